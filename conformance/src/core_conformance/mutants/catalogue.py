"""Every mutant with the level that must kill it, and every honest variant with the ids that must pass it."""

from __future__ import annotations

from core_conformance.mutants import (
    attention_bugs,
    cache_bugs,
    collective_bugs,
    dense_bugs,
    determinism_bugs,
    device_bugs,
    draft_bugs,
    ending_bugs,
    expert_bugs,
    honest_devices,
    honest_kernels,
    kv_bugs,
    latent_bugs,
    memory_bugs,
    minor_bugs,
    model_bugs,
    recurrent_bugs,
    rounded_attention,
    rounding_bugs,
    runner_bugs,
    sampler_bugs,
    sampling_bugs,
    served_bugs,
    weight_bugs,
)
from core_conformance.mutants.variant import Honest, Mutant

__all__ = ["HONEST", "MUTANTS"]

MUTANTS: tuple[Mutant, ...] = tuple(
    sorted(
        (
            *device_bugs.MUTANTS,
            *memory_bugs.MUTANTS,
            *attention_bugs.MUTANTS,
            *cache_bugs.MUTANTS,
            *dense_bugs.MUTANTS,
            *determinism_bugs.MUTANTS,
            *weight_bugs.MUTANTS,
            *rounding_bugs.MUTANTS,
            *rounded_attention.MUTANTS,
            *sampling_bugs.MUTANTS,
            *minor_bugs.MUTANTS,
            *expert_bugs.MUTANTS,
            *latent_bugs.MUTANTS,
            *recurrent_bugs.MUTANTS,
            *collective_bugs.MUTANTS,
            *model_bugs.MUTANTS,
            *kv_bugs.MUTANTS,
            *runner_bugs.MUTANTS,
            *sampler_bugs.MUTANTS,
            *draft_bugs.MUTANTS,
            *ending_bugs.MUTANTS,
            *served_bugs.MUTANTS,
        ),
        key=lambda mutant: mutant.level,
    )
)
"""Each must fail its level."""

HONEST: tuple[Honest, ...] = (
    *honest_kernels.HONEST,
    *honest_devices.HONEST,
    *rounding_bugs.HONEST,
    *rounded_attention.HONEST,
)
"""Each must pass: what differs is how it is done."""

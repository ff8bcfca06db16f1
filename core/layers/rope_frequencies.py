"""Rotary frequencies of each kind of context scaling, in float32 as models were trained with them.

Su et al. 2021 (rope); Chen et al. 2023 (linear); Peng et al. 2023 (yarn); Ding et al. 2024 (longrope); the Llama 3.1
report (llama3); bloc97 and emozilla 2023 (dynamic NTK).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.layers.rope_config import RopeConfig

__all__ = ["attention_factor", "frequencies", "frequencies_for_lengths"]


def frequencies(rope: RopeConfig) -> Tensor:
    """Radians a position, [rotary_dim / 2], float32, host: those of a sequence within the original length."""
    return frequencies_for_lengths(rope, torch.tensor([1]))[0]


def frequencies_for_lengths(rope: RopeConfig, lengths: Tensor) -> Tensor:
    """Radians a position for sequences of the given lengths.

    Args:
        lengths: [R], any integer type, on any device.

    Returns:
        [R, rotary_dim / 2], float32, on the device of `lengths`.
    """
    if rope.rope_type == "dynamic":
        return 1.0 / _powers(rope, _dynamic_base(rope, lengths))
    if rope.rope_type == "longrope":
        return _longrope(rope, lengths)
    inverse = 1.0 / _powers(rope, torch.full((len(lengths),), rope.theta, device=lengths.device))
    if rope.rope_type == "linear":
        return inverse / rope.stretch
    if rope.rope_type == "llama3":
        return _llama3(rope, inverse)
    if rope.rope_type == "yarn":
        return _yarn(rope, inverse)
    return inverse


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    stretch = rope.stretch
    if rope.rope_type == "longrope":
        return math.sqrt(1.0 + math.log(stretch) / math.log(rope.original_max_position)) if stretch > 1.0 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(stretch, rope.mscale) / _magnitude(stretch, rope.mscale_all_dim)
    return _magnitude(stretch, 1.0)


def _powers(rope: RopeConfig, base: Tensor) -> Tensor:
    """base^(2i / rotary_dim), [R, rotary_dim / 2]."""
    exponents = torch.arange(0, rope.rotary_dim, 2, device=base.device).to(torch.float32) / rope.rotary_dim
    return base.to(torch.float32)[:, None] ** exponents


def _dynamic_base(rope: RopeConfig, lengths: Tensor) -> Tensor:
    """Base for each actual length; the bracket is at least 1, whatever length is served."""
    dim, stretch = rope.rotary_dim, rope.stretch
    if dim == 2:
        return torch.full((len(lengths),), rope.theta, device=lengths.device)
    reached = lengths.to(torch.float64).clamp(min=rope.original_max_position)
    bracket = stretch * reached / rope.original_max_position - (stretch - 1.0)
    return rope.theta * bracket ** (dim / (dim - 2))


def _longrope(rope: RopeConfig, lengths: Tensor) -> Tensor:
    short, long = (torch.tensor(side, dtype=torch.float32) for side in (rope.short_factor, rope.long_factor))
    beyond = (lengths > rope.original_max_position)[:, None]
    divisors = torch.where(beyond, long.to(lengths.device), short.to(lengths.device))
    return 1.0 / (divisors * _powers(rope, torch.full((1,), rope.theta, device=lengths.device)))


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    wavelength = 2.0 * math.pi / inverse
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * ((1.0 - blend) / rope.stretch + blend)


def _yarn(rope: RopeConfig, inverse: Tensor) -> Tensor:
    low, high = _yarn_bounds(rope)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device=inverse.device)
    scaled_share = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return inverse / rope.stretch * scaled_share + inverse * (1.0 - scaled_share)


def _yarn_bounds(rope: RopeConfig) -> tuple[float, float]:
    """Pairs between which the scaling sets in."""
    low, high = (_pair_with_rotations(rope, count) for count in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return low, high if high != low else high + 0.001


def _pair_with_rotations(rope: RopeConfig, rotations: float) -> float:
    """Index of the pair that turns so often over the original length; a real number."""
    turns = rope.original_max_position / (rotations * 2.0 * math.pi)
    return rope.rotary_dim * math.log(turns) / (2.0 * math.log(rope.theta))


def _magnitude(stretch: float, weight: float) -> float:
    return 0.1 * weight * math.log(stretch) + 1.0 if stretch > 1.0 else 1.0

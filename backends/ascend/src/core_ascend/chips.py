"""The chips and how they differ, as data. Imports neither torch nor torch_npu."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.spec import DType

__all__ = ["CHIPS", "Chip", "chip_named", "unsupported_chip"]

_HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One family of chips.

    Args:
        family: The word in reasons and tables.
        pattern: Regular expression that the whole SoC name matches ("Ascend910B3").
        halves: 16-bit types that its matrix unit takes.
        block_sizes: KV block sizes, the preferred one first.
        fractal_cache: Whether keys and values lie in fractals of 16 elements (NZ), as its attention call wants them.
        fused_attention: Whether it has `npu_fused_infer_attention_score`; else the ATB calls of older chips.
        fused_latent: Whether it has the calls of DeepSeek's attention, and of the gated delta rule.
        row_scales: Whether its int8 product takes a scale for each row of the activations.
        grouped_rows: Whether it has `npu_moe_init_routing_v2` and `npu_moe_gating_top_k`.
        memory_bytes: Device memory of its largest board, for a simulated one and where nobody tells.
    """

    family: str
    pattern: str
    halves: frozenset[DType]
    block_sizes: tuple[int, ...]
    fractal_cache: bool
    fused_attention: bool
    fused_latent: bool
    row_scales: bool
    grouped_rows: bool
    memory_bytes: int

    @property
    def float_types(self) -> frozenset[DType]:
        """Types of activations that its vector unit takes."""
        return self.halves | {DType.FLOAT32}


CHIPS = (
    Chip(
        family="910B",
        pattern=r"Ascend910B[1-4](C|-\d)?|Ascend910B2C",
        halves=_HALVES,
        block_sizes=(128,),
        fractal_cache=False,
        fused_attention=True,
        fused_latent=True,
        row_scales=True,
        grouped_rows=True,
        memory_bytes=64 * 2**30,
    ),
    Chip(
        family="910C",
        pattern=r"Ascend910_93\d\d",
        halves=_HALVES,
        block_sizes=(128,),
        fractal_cache=False,
        fused_attention=True,
        fused_latent=True,
        row_scales=True,
        grouped_rows=True,
        memory_bytes=64 * 2**30,
    ),
    Chip(
        family="310P",
        pattern=r"Ascend310P\d(-\w+)?",
        halves=frozenset({DType.FLOAT16}),
        block_sizes=(128, 64),
        fractal_cache=True,
        fused_attention=False,
        fused_latent=False,
        row_scales=False,
        grouped_rows=False,
        memory_bytes=24 * 2**30,
    ),
)
"""Every family that the backend drives. None of them has an FP8 unit."""


def chip_named(soc: str) -> Chip | None:
    """The family of a SoC name; None for a chip that the backend does not drive."""
    return next((chip for chip in CHIPS if re.fullmatch(chip.pattern, soc)), None)


def unsupported_chip(soc: str) -> str:
    """Why a chip cannot be used, and what to do; for people."""
    families = ", ".join(chip.family for chip in CHIPS)
    return f"the chip {soc!r} is none that this package drives ({families}); use another device or another package"

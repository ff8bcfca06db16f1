"""Which scheme a safetensors checkpoint is quantized in, from the `quantization_config` of its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError

__all__ = ["SUPPORTED_METHODS", "QuantizationFormat", "detect_quantization"]

SUPPORTED_METHODS = (
    "fp8 (per tensor, or in blocks of 128 x 128)",
    "compressed-tensors (float-quantized or int-quantized weights of 8 bits, per tensor, channel or block)",
)
"""What the loader takes, for messages."""

_BLOCK = 128
_STRATEGIES = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationFormat:
    """How quantized weights look in the files.

    Args:
        method: `quant_method` of the configuration.
        kind: "fp8" or "int8".
        strategy: "tensor", "channel" or "block": what shares a scale.
        scale_suffix: Put in the place of "weight" in a weight's name it names the scale.
    """

    method: str
    kind: str
    strategy: str
    scale_suffix: str = "weight_scale"

    @property
    def dtype(self) -> str:
        """Element type of a quantized weight, as torch spells it."""
        return "int8" if self.kind == "int8" else "float8_e4m3fn"

    def scheme(self) -> str:
        """Scheme of a quantized weight. A scale for a whole tensor is repeated for its rows, for fusing."""
        if self.strategy == "block":
            return "fp8_block"
        return "int8" if self.kind == "int8" else "fp8_channel"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape that the scale of a weight of `shape` (out, in) must have."""
        if self.strategy == "tensor":
            return (1, 1)
        if self.strategy == "channel":
            return (shape[0], 1)
        return (math.ceil(shape[0] / _BLOCK), math.ceil(shape[1] / _BLOCK))


def detect_quantization(path: Path, config: Mapping[str, Any]) -> QuantizationFormat | None:
    """The checkpoint's quantization; None for a dense one.

    Raises:
        ModelLoadError: The method is not supported; the message names it and lists those that are.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{path}: quantization_config is {type(settings).__name__}, not an object; fetch it again")
    method = str(settings.get("quant_method"))
    if method == "fp8":
        found = _detect_fp8(settings)
    elif method == "compressed-tensors":
        found = _detect_compressed(settings)
    else:
        found = None
    if found is None:
        raise ModelLoadError(
            f"{path} is quantized with {_describe(settings)}, which cannot be read; supported are "
            f"{'; '.join(SUPPORTED_METHODS)}; GGUF files bring their own schemes. Use another checkpoint of this model"
        )
    return found


def _detect_fp8(settings: Mapping[str, Any]) -> QuantizationFormat | None:
    block = settings.get("weight_block_size")
    if block is None:
        return QuantizationFormat(method="fp8", kind="fp8", strategy="tensor")
    if list(block) != [_BLOCK, _BLOCK]:
        return None
    return QuantizationFormat(method="fp8", kind="fp8", strategy="block", scale_suffix="weight_scale_inv")


def _detect_compressed(settings: Mapping[str, Any]) -> QuantizationFormat | None:
    groups = list((settings.get("config_groups") or {}).values())
    found = {_detect_group(group.get("weights") or {}) for group in groups}
    return found.pop() if len(found) == 1 else None


def _detect_group(weights: Mapping[str, Any]) -> QuantizationFormat | None:
    kind = {"float": "fp8", "int": "int8"}.get(str(weights.get("type")))
    strategy = weights.get("strategy")
    if (
        kind is None
        or weights.get("num_bits") != 8
        or strategy not in _STRATEGIES
        or not weights.get("symmetric", True)
    ):
        return None
    if strategy == "block" and (kind != "fp8" or list(weights.get("block_structure") or ()) != [_BLOCK, _BLOCK]):
        return None
    return QuantizationFormat(method="compressed-tensors", kind=kind, strategy=strategy)


def _describe(settings: Mapping[str, Any]) -> str:
    method = repr(settings.get("quant_method"))
    details = [f"{key} {settings[key]}" for key in ("format", "bits", "weight_block_size") if key in settings]
    return " ".join((method, *(f"({detail})" for detail in details)))

"""Rotary settings of a GGUF file in the terms of Hugging Face's `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from core.errors import ModelLoadError

__all__ = ["RopeFactors", "RopeMetadata", "rope_config"]

RopeFactors = Mapping[str, list[float]]
"""Factor tensors of the file by name ("rope_freqs.weight", ...): each divides one rotary frequency."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


class RopeMetadata(Protocol):
    """The part of a file's metadata that rotary settings are read from."""

    path: Path

    def get(self, key: str, default: Any = None) -> Any:
        """Value of the architecture's key."""


def rope_config(meta: RopeMetadata, factors: RopeFactors) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` (None where there is none).

    Raises:
        ModelLoadError: The scaling is of an unknown type or lacks its factors.
    """
    theta = float(meta.get("rope.freq_base", 10000.0))
    return {"rope_theta": theta, "rope_scaling": _scaling(meta, theta, factors)}


def _scaling(meta: RopeMetadata, theta: float, factors: RopeFactors) -> dict[str, Any] | None:
    if "rope_freqs.weight" in factors:
        return _from_frequencies(theta, factors["rope_freqs.weight"])
    factor = float(meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 1.0)) or 1.0)
    kind = meta.get("rope.scaling.type", "linear")
    if "rope_factors_long.weight" in factors or kind == "longrope":
        return _longrope(meta, factors)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(meta, factor)
    raise ModelLoadError(f"{meta.path}: rope scaling {kind!r} is unknown; supported are none, linear, yarn, longrope")


def _yarn(meta: RopeMetadata, factor: float) -> dict[str, Any]:
    context = meta.get("rope.scaling.original_context_length") or meta.get("context_length")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    for key in ("beta_fast", "beta_slow"):
        if (value := meta.get(f"rope.scaling.yarn_{key}")) is not None:
            scaling[key] = value
    if (attention := meta.get("rope.scaling.attn_factor")) is not None:
        # The file's factor multiplies the one that yarn computes from `factor`; Hugging Face's replaces it.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _longrope(meta: RopeMetadata, factors: RopeFactors) -> dict[str, Any]:
    missing = [name for name in ("rope_factors_long.weight", "rope_factors_short.weight") if name not in factors]
    if missing:
        raise ModelLoadError(f"{meta.path}: longrope scaling lacks {', '.join(missing)}; fetch a complete file")
    return {
        "rope_type": "longrope",
        "long_factor": factors["rope_factors_long.weight"],
        "short_factor": factors["rope_factors_short.weight"],
        "attention_factor": float(meta.get("rope.scaling.attn_factor", 1.0)),
        "original_max_position_embeddings": meta.get("rope.scaling.original_context_length"),
    }


def _from_frequencies(theta: float, factors: list[float]) -> dict[str, Any]:
    """Scaling of Llama 3, whose parameters the file lacks: tried with the published ones, else kept as plain factors.

    Factors without a formula are a longrope that does not change with length, which is exact.
    """
    factor = max(factors)
    expected = [_llama3_factor(theta, index, len(factors), factor) for index in range(len(factors))]
    if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factor(theta: float, index: int, count: int, factor: float) -> float:
    wavelength: float = 2 * math.pi * theta ** (index / count)
    if wavelength < _LLAMA3_CONTEXT / _LLAMA3_HIGH:
        return 1.0
    if wavelength > _LLAMA3_CONTEXT / _LLAMA3_LOW:
        return factor
    smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1.0 / ((1.0 - smooth) / factor + smooth)

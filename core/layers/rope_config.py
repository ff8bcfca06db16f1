"""Rotary settings of a model, read from either spelling of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import ModelLoadError

__all__ = ["ROPE_TYPES", "RopeConfig", "parse_rope"]

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
"""Kinds of rotary scaling that are computed."""

_OLD_NAMES = {"su": "longrope"}
_NUMBERS = (
    "factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One set of rotary frequencies. Equal values are equal tables.

    Args:
        rope_type: One of `ROPE_TYPES`.
        theta: Base of the frequencies.
        rotary_dim: Elements of a head that are rotated; even.
        max_position: Positions that the model claims (`max_position_embeddings`).
        original_max_position: Positions that it was trained on before scaling.
        factor: How far the context is stretched; None derives it from the two above.
        attention_factor: Multiplier of cosines and sines; None derives it.
        mscale: Numerator weight of the derived multiplier (yarn).
        mscale_all_dim: Denominator weight of it (yarn).
        beta_fast: Rotations above which a frequency is left alone (yarn).
        beta_slow: Rotations below which it is fully scaled (yarn).
        truncate: Whether the bounds of the ramp are whole numbers (yarn).
        low_freq_factor: Bounds the long wavelengths (llama3).
        high_freq_factor: Bounds the short ones (llama3).
        short_factor: Divisor of each frequency within the original length (longrope).
        long_factor: The same beyond it (longrope).
    """

    theta: float
    rotary_dim: int
    max_position: int
    original_max_position: int
    rope_type: str = "default"
    factor: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def stretch(self) -> float:
        """`factor`, or what the two lengths make it."""
        return self.factor if self.factor is not None else self.max_position / self.original_max_position

    @property
    def max_model_len(self) -> int:
        """Longest sequence that these positions serve."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position * self.stretch)
        if self.rope_type == "yarn":
            return max(self.max_position, int(self.original_max_position * self.stretch))
        return self.max_position

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of a position depend on the length of its sequence."""
        return self.rope_type == "dynamic" or (self.rope_type == "longrope" and self.short_factor != self.long_factor)


def parse_rope(
    config: Mapping[str, Any], head_dim: int, *, layer_type: str = "", theta: float = 10000.0, partial: bool = False
) -> RopeConfig:
    """Rotary settings of a config.json.

    Args:
        config: `rope_parameters` (newer) or `rope_theta` and `rope_scaling` (older).
        head_dim: Elements of a head.
        layer_type: Key of `rope_parameters` where it has one set for each kind of layer.
        theta: Base where the configuration names none.
        partial: Whether the architecture can rotate a part of each head (`partial_rotary_factor`).

    Raises:
        ModelLoadError: A kind that is not computed, or a setting that is missing or impossible.
    """
    given = _parameters(config, layer_type)
    name = given.get("rope_type") or given.get("type") or "default"
    rope_type = _OLD_NAMES.get(name, name)
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(
            f"rope type {name!r} of config.json is not computed; supported are {', '.join(ROPE_TYPES)}: "
            "use another model"
        )
    _check_present(rope_type, given)
    found = _known(given)
    found["theta"] = float(given.get("rope_theta") or config.get("rope_theta") or theta)
    found["rotary_dim"] = _rotary_dim(config, given, head_dim, partial)
    found["max_position"] = int(config.get("max_position_embeddings") or 2048)
    found["original_max_position"] = _original_length(config, given, rope_type)
    return _checked(RopeConfig(rope_type=rope_type, **found))


def _parameters(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = given.get(layer_type) if layer_type else None
    return nested if isinstance(nested, Mapping) else given


def _rotary_dim(config: Mapping[str, Any], given: Mapping[str, Any], head_dim: int, partial: bool) -> int:
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if share != 1.0 and not partial:
        raise ModelLoadError(
            f"config.json: partial_rotary_factor {share} for an architecture that rotates whole heads; "
            "correct it or use another model"
        )
    return int(head_dim * share)


def _check_present(rope_type: str, given: Mapping[str, Any]) -> None:
    missing = [key for key in _REQUIRED[rope_type] if given.get(key) is None]
    if missing:
        raise ModelLoadError(
            f"rope type {rope_type!r} of config.json lacks {', '.join(missing)}; fetch the model again"
        )


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that carry their own name; a null counts as absent."""
    found: dict[str, Any] = {key: float(given[key]) for key in _NUMBERS if given.get(key) is not None}
    for key in ("short_factor", "long_factor"):
        found[key] = tuple(float(value) for value in given.get(key) or ())
    found["truncate"] = bool(given.get("truncate", True))
    return found


def _original_length(config: Mapping[str, Any], given: Mapping[str, Any], rope_type: str) -> int:
    """Dynamic scaling starts from the claimed length; the others name an original one, or claim it."""
    claimed = config.get("max_position_embeddings") or 2048
    if rope_type in ("default", "linear", "dynamic"):
        return int(claimed)
    key = "original_max_position_embeddings"
    return int(config.get(key) or given.get(key) or claimed)


def _checked(rope: RopeConfig) -> RopeConfig:
    if rope.rotary_dim < 2 or rope.rotary_dim % 2:
        raise ModelLoadError(f"{rope.rotary_dim} rotated elements a head: an even number of at least 2 is needed")
    if rope.factor is not None and rope.factor < 1.0:
        raise ModelLoadError(f"rope factor {rope.factor} of config.json is below 1; correct it or use another model")
    pairs = rope.rotary_dim // 2
    for key in ("short_factor", "long_factor"):
        count = len(getattr(rope, key))
        if rope.rope_type == "longrope" and count != pairs:
            raise ModelLoadError(
                f"{key} of config.json has {count} values for {pairs} rotary pairs; fetch the model again"
            )
    return rope

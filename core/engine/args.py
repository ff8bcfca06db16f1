"""Flat arguments, as the command line and `LLM(...)` take them, to an EngineConfig."""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.errors import ConfigError

__all__ = ["engine_config"]

_ALIASES = {
    "gpu_memory_utilization": "device_memory_utilization",
    "num_kv_blocks": "num_blocks",
    "num_gpu_blocks_override": "num_blocks",
    "swap_space": "swap_space_bytes",
    "threads": "num_threads",
}
"""Names that users know, to the fields that they mean."""


def engine_config(model: str, **args: Any) -> EngineConfig:
    """The configuration that these arguments mean.

    Args:
        model: A folder, a file, or a name that `core pull` knows.
        args: Fields of EngineConfig, SchedulerConfig and CacheConfig by name, or by the names that users know
            (`gpu_memory_utilization`, `num_kv_blocks`, `swap_space`, `threads`).

    Raises:
        ConfigError: a name is unknown (with the nearest known one), or a value is wrong.
    """
    top, scheduler, cache = (_fields(kind) for kind in (EngineConfig, SchedulerConfig, CacheConfig))
    parts: dict[str, dict[str, Any]] = {"top": {}, "scheduler": {}, "cache": {}}
    for given, value in args.items():
        name = _ALIASES.get(given, given)
        if name in top:
            parts["top"][name] = value
        elif name in scheduler:
            parts["scheduler"][name] = value
        elif name in cache:
            parts["cache"][name] = value
        else:
            raise ConfigError(_unknown(given, top | scheduler | cache | _ALIASES.keys()))
    raw = {"model": model, "scheduler": parts["scheduler"], "cache": parts["cache"], **parts["top"]}
    try:
        return _with_swap_space(msgspec.convert(raw, EngineConfig))
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"an engine argument has a wrong value: {error}; give one of the right type") from error


def _with_swap_space(config: EngineConfig) -> EngineConfig:
    """`config`; whoever asks for swapping must say where to, else requests would be recomputed without a word."""
    if config.scheduler.preemption_mode == "swap" and not config.cache.swap_space_bytes:
        raise ConfigError(
            "--preemption-mode swap needs host memory to swap to and --swap-space is 0; give --swap-space 4GiB, or "
            "use --preemption-mode recompute"
        )
    return config


def _fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__) - {"scheduler", "cache", "model"}


def _unknown(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"there is no engine argument {name!r}; " + (
        f"did you mean {near[0]!r}?" if near else "see the documentation"
    )

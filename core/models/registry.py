"""Which class serves which architecture; models are imported when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from core.errors import ModelLoadError
from core.layers import BuildContext
from core.models.base import CausalLM
from core.spec import DType, ModelEntry, ModelSpec

__all__ = ["BUILT_IN", "build_model", "describe", "find_model"]


def _entry(architecture: str, module: str) -> ModelEntry:
    return ModelEntry(architecture=architecture, load=f"core.models.{module}:{architecture}")


BUILT_IN: tuple[ModelEntry, ...] = (
    _entry("LlamaForCausalLM", "llama"),
    _entry("MistralForCausalLM", "mistral"),
    _entry("Qwen2ForCausalLM", "qwen2"),
    _entry("Qwen3ForCausalLM", "qwen3"),
    _entry("Gemma3ForCausalLM", "gemma3"),
    _entry("Gemma3ForConditionalGeneration", "gemma3"),
)
"""Architectures that the core brings."""


def find_model(config: Mapping[str, Any], extra: Iterable[ModelEntry] = ()) -> type[CausalLM]:
    """The class for a configuration's architecture.

    Args:
        config: As in config.json.
        extra: What installed packages bring (`core_models()`); they win over the core's own.

    Raises:
        ModelLoadError: The architecture is unknown, or its package cannot be imported; the message names the
            supported ones, or the cause.
    """
    entries = {entry.architecture: entry for entry in (*BUILT_IN, *extra)}
    wanted = list(config.get("architectures") or ())
    for architecture in wanted:
        if architecture in entries:
            return _load(entries[architecture])
    named = ", ".join(map(repr, wanted)) or "none"
    raise ModelLoadError(
        f"config.json names architecture {named}; supported are {', '.join(sorted(entries))}: "
        "use one of these, or install a package that brings the model"
    )


def build_model(config: Mapping[str, Any], ctx: BuildContext, extra: Iterable[ModelEntry] = ()) -> CausalLM:
    """A model built and bound, without weights; `load` follows. With `ctx.dry` only `ctx.binder.table` is of use.

    Raises:
        ModelLoadError: As `find_model`, or the configuration is unusable.
        ConfigError: The model cannot be divided among the ranks.
        UnsupportedError: The device cannot do an operation.
    """
    return find_model(config, extra).from_config(config, ctx)


def describe(
    config: Mapping[str, Any],
    dtype: DType,
    *,
    kv_dtype: DType | None = None,
    num_tokenizer_ids: int = 0,
    world: int = 1,
    extra: Iterable[ModelEntry] = (),
) -> ModelSpec:
    """A model's shape from its configuration alone: no weights, no device.

    Args:
        config: As in config.json.
        dtype: Type of activations.
        kv_dtype: Type of the cache; None takes `dtype`.
        num_tokenizer_ids: Ids that the tokenizer knows; 0 where unknown.
        world: Tensor-parallel ranks.
        extra: As in `find_model`.

    Raises:
        ModelLoadError: As `find_model`, or the configuration is unusable.
        ConfigError: The model cannot be divided among the ranks.
    """
    model = find_model(config, extra)
    return model.describe(config, dtype, kv_dtype=kv_dtype, num_tokenizer_ids=num_tokenizer_ids, world=world)


def _load(entry: ModelEntry) -> type[CausalLM]:
    module, _, name = entry.load.partition(":")
    try:
        found: type[CausalLM] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(
            f"architecture {entry.architecture} is announced as {entry.load!r}, which cannot be imported ({error}); "
            "reinstall the package that brings it"
        ) from error
    return found

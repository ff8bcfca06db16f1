"""From a configuration to an engine: the runner first, since only it knows what fits the device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import cast

import msgspec

from core.config import EngineConfig
from core.engine.engine import Engine
from core.engine.protocol import EngineFacts
from core.errors import ConfigError
from core.exec.runner_api import Runner
from core.kv import HostTier, KVCacheManager
from core.sched.scheduler import Scheduler
from core.text import tokenizer as text_tokenizer
from core.text.tokenizer import Tokenizer

__all__ = ["build_engine", "count_token_ids", "load_tokenizer", "served_max_model_len"]

RunnerFactory = Callable[[EngineConfig], Runner]


def build_engine(config: EngineConfig, *, runner_factory: str | RunnerFactory | None = None) -> Engine:
    """An engine that takes requests: device found, weights loaded, KV pool sized.

    Args:
        config: What the operator asked for.
        runner_factory: A callable, or "module:function" that names one, used in place of the device's own runner.

    Raises:
        CoreError: whatever the operator can do something about, from a wrong flag to a missing shard.
    """
    runner = _runner_factory(runner_factory)(config)
    try:
        kv = _kv_cache_manager(config, runner)
        capacity = kv.capacity_tokens(whole=not config.scheduler.enable_chunked_prefill)
        max_model_len = served_max_model_len(config, runner.model_spec.max_model_len, capacity)
        scheduler = Scheduler(msgspec.structs.replace(config.scheduler, max_model_len=max_model_len), kv)
        facts = _facts(config, runner, max_model_len)
        return Engine(scheduler, runner, facts, async_scheduling=config.scheduler.async_scheduling)
    except BaseException:
        runner.close()
        raise


def served_max_model_len(config: EngineConfig, own: int, capacity_tokens: int) -> int:
    """The longest sequence to serve: the operator's, else the model's own as far as one fits the KV pool.

    Args:
        config: What the operator asked for.
        own: Positions that the model allows.
        capacity_tokens: Most tokens of one request that the KV pool holds.

    Raises:
        ConfigError: the operator's is longer than the model's positions allow.
    """
    if config.max_model_len is None:
        return min(own, capacity_tokens)
    if config.max_model_len < 1:
        raise ConfigError(f"--max-model-len must be at least 1, got {config.max_model_len}; give a larger value")
    if config.max_model_len > own:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is longer than the {own} positions of {config.model!r}; "
            f"give at most {own}"
        )
    return config.max_model_len


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer that the configuration names, else the model's own.

    Raises:
        ModelNotFoundError: it is not on disk.
        ModelLoadError: its files are damaged.
    """
    from core.loader.hub import resolve_model

    return text_tokenizer.load_tokenizer(resolve_model(config.tokenizer or config.model, config.revision))


def count_token_ids(config: EngineConfig) -> int:
    """`vocab_size` of the tokenizer that `load_tokenizer` gives, without building it.

    Raises:
        ModelNotFoundError: it is not on disk.
        ModelLoadError: its files are damaged.
    """
    from core.loader.hub import resolve_model

    return text_tokenizer.count_token_ids(resolve_model(config.tokenizer or config.model, config.revision))


def _runner_factory(factory: str | RunnerFactory | None) -> RunnerFactory:
    if factory is None:
        from core.engine.device_runner import make_runner  # brings torch, which a stub runner does without

        return make_runner
    if not isinstance(factory, str):
        return factory
    module, _, name = factory.partition(":")
    try:
        return cast(RunnerFactory, getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"runner factory {factory!r} cannot be loaded ({error}); give module:function") from error


def _kv_cache_manager(config: EngineConfig, runner: Runner) -> KVCacheManager:
    return KVCacheManager(
        runner.cache_groups,
        runner.num_blocks,
        runner.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        swap_tier=HostTier(runner.num_host_blocks) if runner.num_host_blocks else None,
    )


def _facts(config: EngineConfig, runner: Runner, max_model_len: int) -> EngineFacts:
    spec = runner.model_spec
    return EngineFacts(
        model=config.model,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        dtype=str(spec.dtype),
        device=config.device,
        resolved=runner.resolved,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        num_parameters=spec.num_parameters,
        pid=os.getpid(),
    )

"""From a configuration to an engine: the runner first, since only it knows what fits the device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import cast

import msgspec

from core.config import EngineConfig, SchedulerConfig
from core.engine.engine import Engine
from core.engine.protocol import EngineFacts
from core.errors import ConfigError
from core.exec.runner_api import Runner
from core.sched.scheduler import Scheduler

__all__ = ["build_engine", "served_max_model_len"]

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
        max_model_len = served_max_model_len(config, runner)
        scheduler_config = msgspec.structs.replace(config.scheduler, max_model_len=max_model_len)
        scheduler = _scheduler(config, runner, scheduler_config)
        facts = _facts(config, runner, max_model_len)
        return Engine(scheduler, runner, facts, async_scheduling=config.scheduler.async_scheduling)
    except BaseException:
        runner.close()
        raise


def served_max_model_len(config: EngineConfig, runner: Runner) -> int:
    """The longest sequence to serve: the operator's, else the model's own as far as one fits the KV pool.

    Raises:
        ConfigError: the operator's is longer than the model's positions allow.
    """
    own = runner.model_spec.max_model_len
    if config.max_model_len is None:
        return max(1, min(own, (runner.num_blocks - 1) * runner.block_size))
    if config.max_model_len < 1:
        raise ConfigError(f"--max-model-len must be at least 1, got {config.max_model_len}; give a larger value")
    if config.max_model_len > own:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is longer than the {own} positions of {config.model!r}; "
            f"give at most {own}"
        )
    return config.max_model_len


def _runner_factory(factory: str | RunnerFactory | None) -> RunnerFactory:
    if factory is None:
        from core.exec.build import make_runner

        return make_runner
    if not isinstance(factory, str):
        return factory
    module, _, name = factory.partition(":")
    try:
        return cast(RunnerFactory, getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"runner factory {factory!r} cannot be loaded ({error}); give module:function") from error


def _scheduler(config: EngineConfig, runner: Runner, scheduler_config: SchedulerConfig) -> Scheduler:
    raise NotImplementedError


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

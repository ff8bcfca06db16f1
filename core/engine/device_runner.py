"""From a configuration to a runner on a real device: discovery opens the device, `core.exec.build` fills it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core import plugins
from core.backend import Limits, OpenConfig
from core.config import EngineConfig
from core.engine.build import count_token_ids
from core.engine.load_progress import load_progress
from core.exec.build import build_runner
from core.exec.model_runner import ModelRunner
from core.loader.checkpoint import open_checkpoint
from core.loader.hub import resolve_model

__all__ = ["make_runner"]


def make_runner(config: EngineConfig) -> ModelRunner:
    """Opens the device, loads the model onto it, and sizes the KV pool.

    Raises:
        CoreError: whatever the operator can do something about; the device is given back.
    """
    path = resolve_model(config.model, config.revision)
    checkpoint = open_checkpoint(path)
    try:
        opened = plugins.open_device(config.device, _open_config(config, checkpoint.config))
        try:
            with load_progress(config.model) as progress:
                return build_runner(
                    config,
                    checkpoint,
                    opened.backend,
                    opened.info,
                    opened.device,
                    num_tokenizer_ids=count_token_ids(config),
                    extra_models=plugins.list_models(),
                    progress=progress,
                )
        except BaseException:
            opened.backend.close()
            raise
    finally:
        checkpoint.close()


def _open_config(config: EngineConfig, model: Mapping[str, Any]) -> OpenConfig:
    limits = Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.max_model_len or int(model.get("max_position_embeddings") or Limits.max_model_len),
    )
    return OpenConfig(limits=limits, deterministic=config.deterministic, num_threads=config.num_threads)

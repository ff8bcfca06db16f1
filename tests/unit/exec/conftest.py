"""Engines over tiny models and the bare backend, in this process, stepped by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

UNIT = Path(__file__).parent.parent
for name in ("models", "backend", "exec"):
    if str(UNIT / name) not in sys.path:
        sys.path.insert(0, str(UNIT / name))

from bare import DEVICE, INFO, opened  # noqa: E402
from engine_rig import MakeRig, OpenedDevice, Rig  # noqa: E402
from tiny import make_tiny  # noqa: E402

from core.config import CacheConfig, EngineConfig, SchedulerConfig  # noqa: E402
from core.engine.build import build_engine  # noqa: E402
from core.engine.engine import Engine  # noqa: E402
from core.exec.build import build_runner  # noqa: E402
from core.exec.model_runner import ModelRunner  # noqa: E402
from core.loader.checkpoint import open_checkpoint  # noqa: E402

BLOCK_SIZE = 16
NUM_TOKENIZER_IDS = 259


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), seed=3)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("Gemma3ForCausalLM", tmp_path_factory.mktemp("gemma"), seed=4)


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    engines: list[Engine] = []

    def make(
        folder: Path,
        *,
        device: OpenedDevice | None = None,
        enforce_eager: bool = False,
        cache: dict[str, Any] | None = None,
        drafter: Any = None,
        token_masks: Any = None,
        **scheduler: Any,
    ) -> Rig:
        made: list[ModelRunner] = []

        def factory(config: EngineConfig) -> ModelRunner:
            backend, info, where = device or (opened(), INFO, DEVICE)
            with open_checkpoint(folder) as checkpoint:
                runner = build_runner(
                    config,
                    checkpoint,
                    backend,
                    info,
                    where,
                    num_tokenizer_ids=NUM_TOKENIZER_IDS,
                    drafter=drafter,
                    token_masks=token_masks,
                )
            made.append(runner)
            return runner

        block_size = {} if device else {"block_size": BLOCK_SIZE}
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            enforce_eager=enforce_eager,
            scheduler=SchedulerConfig(**{"max_num_seqs": 16, "max_num_batched_tokens": 64, **scheduler}),
            cache=CacheConfig(**{**block_size, "num_blocks": 128, **(cache or {})}),
        )
        engine = build_engine(config, runner_factory=factory)
        engines.append(engine)
        return Rig(engine, made[0])

    yield make
    for engine in engines:
        engine.close()

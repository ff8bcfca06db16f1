"""An engine over a tiny model, stepped by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.backend import Backend
from core.engine.engine import Engine
from core.exec.model_runner import ModelRunner
from core.outputs import EngineOutput
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core.spec import BackendInfo, DeviceInfo

OpenedDevice = tuple[Backend, BackendInfo, DeviceInfo]
"""A backend that was opened, how it announced itself, and which of its devices it has."""


class Rig:
    """An engine with its runner, and requests run to their end."""

    def __init__(self, engine: Engine, runner: ModelRunner) -> None:
        self.engine = engine
        self.runner = runner
        self.num_requests = 0

    def start(self, prompt: list[int], **params: Any) -> str:
        """Queues a request and returns its id."""
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        params.setdefault("temperature", 0.0)
        salt = params.pop("cache_salt", None)
        source = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(**params),
            cache_salt=salt,
        )
        self.engine.add_requests([source])
        return request_id

    def finish(self) -> dict[str, list[EngineOutput]]:
        """Steps until nothing is left; the books are checked after each step."""
        news: dict[str, list[EngineOutput]] = {}
        for _ in range(20_000):
            if not self.engine.has_work():
                assert self.engine.stats().kv_cache_usage == 0.0
                return news
            for output in self.engine.step():
                news.setdefault(output.request_id, []).append(output)
            self.engine.check_integrity()
        raise AssertionError("the engine does not come to an end")

    def run(self, prompts: list[list[int]], **params: Any) -> list[list[int]]:
        """Output token ids of each prompt, run together."""
        ids = [self.start(prompt, **params) for prompt in prompts]
        news = self.finish()
        return [[token for output in news[i] for token in output.new_token_ids] for i in ids]


MakeRig = Callable[..., Rig]

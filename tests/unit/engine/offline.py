"""An LLM over the stub runner, and what tests of it need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import stub_runner
from byte_tokenizer import byte_tokenizer
from stub_runner import Script, StubRunner

from core.llm import LLM
from core.outputs import RequestOutput
from core.sampling_params import SamplingParams


class StubLLM(LLM):
    """An LLM whose runner plays a script; `runner` is that runner."""

    runner: StubRunner

    def __init__(
        self, script: Script, pieces: Mapping[int, bytes] | None = None, *, eos: tuple[int, ...] = (), **args: Any
    ) -> None:
        def make(config: Any) -> StubRunner:
            self.runner = stub_runner.make(config)
            return self.runner

        super().__init__(script.model(), tokenizer=byte_tokenizer(pieces, eos=eos), runner_factory=make, **args)

    def ask(self, prompt: Any, **params: Any) -> RequestOutput:
        """The answer to one prompt, greedy."""
        return self.generate(prompt, SamplingParams(**({"temperature": 0.0} | params)), use_tqdm=False)[0]

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        self._engine.check_integrity()
        stats = self.get_metrics()
        assert (stats.num_requests_running, stats.num_requests_waiting, len(self._outputs)) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks

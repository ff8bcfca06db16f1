"""The same engine with text at both ends: what a caller sends is checked, and what comes out is merged and decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.engine.input_processor import InputProcessor
from core.engine.output_processor import OutputKind, OutputProcessor
from core.outputs import RequestOutput
from core.sampling_params import SamplingParams
from core.text.tokenizer import load_tokenizer
from core_conformance.engines.models import model_folder
from core_conformance.engines.rig import Rig

__all__ = ["TextRig"]


class TextRig:
    """Requests of text or ids, run to their end in this process.

    Args:
        rig: The engine.
        eos_token_ids: Ids that end a sequence.
    """

    def __init__(self, rig: Rig, eos_token_ids: Sequence[int] = ()) -> None:
        self._rig = rig
        facts = rig.engine.facts
        self.tokenizer = load_tokenizer(model_folder(rig.model))
        self._outputs = OutputProcessor(self.tokenizer)
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            max_logprobs=20,
            eos_token_ids=eos_token_ids,
            seed=0,
        )

    def run(self, asked: Sequence[tuple[Sequence[int], Mapping[str, Any]]]) -> list[RequestOutput]:
        """The last output of each (prompt, sampling parameters), all run together; greedy unless told otherwise."""
        requests = []
        for prompt, params in asked:
            request = self._inputs.process(list(prompt), SamplingParams(**{"temperature": 0.0, **params}))
            self._outputs.add(request, OutputKind.FINAL_ONLY)
            self._rig.engine.add_requests(request.choices)
            requests.append(request)
        done: dict[str, RequestOutput] = {}
        while self._rig.engine.has_work():
            news, ended = self._outputs.process(self._rig.step())
            self._rig.engine.abort(ended)
            done.update(news)
        self._rig.must_be_empty()
        return [done[request.key] for request in requests]

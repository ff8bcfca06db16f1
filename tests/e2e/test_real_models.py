"""SmolLM2 and Gemma 3: greedy text is that of transformers in float32, up to ties that are measured and counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from core_process import default_device
from real_models import MODELS, pulled, reference_logits

from core import LLM, SamplingParams
from core.outputs import RequestOutput

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little",
    "1, 2, 3, 4, 5,",
    "The opposite of hot is",
    "def fibonacci(n):",
    "My favourite colour is blue because",
)
NUM_TOKENS = 16

TIES = {"float32": 1e-3, "bfloat16": 0.25}
"""By dtype: where the reference's best token leads ours by less, in logits, the two count as level."""
MAX_TIES = {"float32": 0, "bfloat16": 5}
"""Level pairs that may be decided otherwise, of all tokens of a model. Measured: none in float32, 1 or 2 in bfloat16,
of gaps up to 0.07."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def answers(path: str, dtype: str) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(path, device=default_device(), dtype=dtype, max_model_len=256) as llm:
        return llm.generate(list(PROMPTS), params, use_tqdm=False)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_greedy_text_is_that_of_transformers(model: object) -> None:
    """At every position, after the same tokens, our token is the reference's best one, or level with it.

    Where that holds without a tie the whole text is the reference's, by induction over the positions.
    """
    path = pulled(model.name)  # type: ignore[attr-defined]
    outputs = {dtype: answers(str(path), dtype) for dtype in TIES}
    sequences = [o.prompt_token_ids + o.outputs[0].token_ids for found in outputs.values() for o in found]
    logits = iter(reference_logits(path, sequences))
    for dtype, found in outputs.items():
        gaps: list[float] = []
        for output in found:
            rows = next(logits)[len(output.prompt_token_ids) - 1 : -1]
            tokens = torch.tensor(output.outputs[0].token_ids)
            assert len(tokens) == len(rows) == NUM_TOKENS
            lead = rows.max(dim=-1).values - rows.gather(1, tokens[:, None])[:, 0]
            gaps += lead[lead > 0].tolist()
        assert all(gap < TIES[dtype] for gap in gaps), (dtype, gaps)
        assert len(gaps) <= MAX_TIES[dtype], (dtype, gaps)

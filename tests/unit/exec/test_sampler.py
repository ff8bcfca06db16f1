"""The sampler on logits that a test writes: masks, penalties, temperatures, logprobs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from bare import binder

from core.backend.ops import Determinism
from core.exec.request_state import RequestState
from core.exec.sampler import SampledRows, Sampler, SamplingRow, needs_known_tokens, position_logprobs
from core.sampling_params import SamplingParams
from core.sched.output import NewRequest

VOCAB = 16


def _row(tokens: list[int], num_prompt: int, **params: Any) -> SamplingRow:
    request = NewRequest(
        request_id=f"r{len(tokens)}",
        token_ids=tokens,
        num_prompt_tokens=num_prompt,
        sampling_params=SamplingParams(**params),
        block_ids=(),
    )
    state = RequestState(request, 0)
    row = SamplingRow(state=state, position=len(tokens))
    if needs_known_tokens(state.params):
        row.token_ids = np.array(tokens, dtype=np.int32)
    return row


def _sample(logits: list[list[float]], rows: list[SamplingRow]) -> SampledRows:
    sampler = Sampler(binder(), len(logits[0]), torch.device("cpu"), Determinism.D0)
    return sampler.sample(torch.tensor(logits), rows)


def _ramp() -> list[float]:
    return [float(i) for i in range(VOCAB)]


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_act_like_greedy(temperature: float) -> None:
    """H014: half-precision logits over a tiny temperature overflow; here they are scaled in float32 and clamped."""
    logits = torch.tensor([2.875, 11.0625, 2.955, -2.447], dtype=torch.float16).float().tolist()
    out = _sample([logits], [_row([1], 1, temperature=temperature, seed=1, logprobs=2)])
    assert out.token_ids.tolist() == [1]
    assert out.logprobs is not None
    assert all(math.isfinite(value) for value in out.logprobs[0].flatten().tolist())


def test_a_tiny_top_p_keeps_the_most_likely_token() -> None:
    """H014."""
    logits = [2.875, 11.0625, 2.955, -2.447]
    rows = [_row([1], 1, temperature=1.0, top_p=0.0001, seed=seed) for seed in range(8)]
    assert _sample([logits] * 8, rows).token_ids.tolist() == [1] * 8


def test_min_tokens_blocks_every_end_until_exactly_then() -> None:
    """H005 a: four tokens that end nothing, then the end; prompt tokens do not count."""
    ends = {"eos_token_ids": (2, 7), "min_tokens": 4, "temperature": 0.0, "max_tokens": 32}
    logits = [0.0] * VOCAB
    logits[2] = logits[7] = 100.0
    logits[5] = 1.0
    sampled = [_sample([logits], [_row([1] * 3 + [5] * n, 3, **ends)]).token_ids.item() for n in range(6)]
    assert sampled == [5, 5, 5, 5, 2, 2]


def test_the_last_id_of_the_vocabulary_is_no_sentinel() -> None:
    """H005 c."""
    row = _row([1, 1], 2, temperature=0.0, min_tokens=4, ignore_eos=True, eos_token_ids=(2,))
    assert _sample([_ramp()], [row]).token_ids.item() == VOCAB - 1


def test_bad_words_block_their_last_token_behind_the_others() -> None:
    """H016 a: the one-token form always, the long form exactly where its head was just generated."""
    words = {"bad_words_token_ids": ((3, 4, 15), (14,)), "temperature": 0.0}
    assert _sample([_ramp()], [_row([1], 1, **words)]).token_ids.item() == 15
    assert _sample([_ramp()], [_row([1, 3, 4], 1, **words)]).token_ids.item() == 13
    assert _sample([_ramp()], [_row([3, 4], 2, **words)]).token_ids.item() == 15, "the prompt is no output"


def test_an_allowlist_holds_against_bad_words() -> None:
    """H016 b, c."""
    rows = [
        _row([1], 1, temperature=0.0, allowed_token_ids=(5, 6), bad_words_token_ids=((6,),)),
        _row([1], 1, temperature=0.0, allowed_token_ids=(5,), bad_words_token_ids=((5,),)),
        _row([1], 1, temperature=0.0),
    ]
    out = _sample([_ramp()] * 3, rows)
    assert out.token_ids[0] == 5
    assert out.token_ids[2] == VOCAB - 1
    assert list(out.failed) == [1]


def test_penalties_match_their_formulas() -> None:
    tokens, num_prompt = [1, 2, 3, 3, 4], 2
    row = _row(
        tokens,
        num_prompt,
        temperature=0.0,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={9: -3.0},
        logprobs=0,
    )
    logits = torch.linspace(-2, 2, VOCAB)
    expected = logits.clone()
    for token in set(tokens):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token, count in {3: 2, 4: 1}.items():
        expected[token] -= 0.5 * count + 0.25
    expected[9] -= 3.0
    sampler = Sampler(binder(), VOCAB, torch.device("cpu"), Determinism.D0)
    work = logits[None].clone()
    out = sampler.sample(work, [row])
    assert torch.allclose(work[0], expected)
    assert out.logprobs is not None
    assert out.logprobs[0][0, 0] == pytest.approx(float(torch.log_softmax(logits, 0)[VOCAB - 1]))


def test_logprobs_list_the_actual_token_first_with_its_rank() -> None:
    rows = [_row([1], 1, temperature=0.0, logprobs=2, logit_bias={0: 100.0}), _row([1], 1, temperature=0.0)]
    out = _sample([_ramp(), _ramp()], rows)
    assert out.logprob_rows == [0]
    assert out.logprobs is not None
    [entry] = position_logprobs(out.logprobs, [2])
    assert entry.token_ids == (0, VOCAB - 1, VOCAB - 2)
    assert entry.actual_rank == VOCAB
    assert entry.logprobs[1] == pytest.approx(float(torch.log_softmax(torch.tensor(_ramp()), 0).max()))

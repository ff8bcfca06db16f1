"""Masks from outside of the sampling parameters: what a grammar will bring, here fixed functions of the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_rig import MakeRig

from core.exec.token_masks import mask_words
from core.outputs import FinishReason

VOCAB = 259


def bits(token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    words = np.zeros(mask_words(VOCAB), dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)
    return words.view(np.int32)


class Rule:
    """Constrains requests of odd number: what may follow is a function of the output so far."""

    def __init__(self, allowed: Callable[[list[int]], list[int] | None]) -> None:
        self.rule = allowed

    def constrains(self, request_id: str) -> bool:
        return int(request_id[1:]) % 2 == 1

    def allowed(self, request_id: str, output_token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        wanted = self.rule(output_token_ids.tolist())
        return None if wanted is None else bits(wanted)


RING = (0, 31, 32, 63, 64, 100, 200, 258)
"""Some are at the ends of words, one at the end of the vocabulary."""


def follows(output: list[int]) -> list[int]:
    """One of the next three of the ring."""
    start = RING.index(output[-1]) + 1 if output and output[-1] in RING else 0
    return [RING[(start + i) % len(RING)] for i in range(3)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"async_scheduling": False}, {"force_preemption": True}, {"max_num_batched_tokens": 5}],
    ids=["default", "sync", "preemption", "chunks"],
)
def test_constrained_requests_keep_to_their_masks_and_others_do_not_notice(
    settings: dict[str, Any], llama: Path, make_rig: MakeRig
) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8] * 9, [9, 10]]
    free = make_rig(llama).run(prompts, max_tokens=6, ignore_eos=True)
    rig = make_rig(llama, token_masks=Rule(follows), **settings)
    held = rig.run(prompts, max_tokens=6, ignore_eos=True)
    assert [held[1], held[3]] == [free[1], free[3]]
    for tokens in (held[0], held[2]):
        assert len(tokens) == 6 and all(token in follows(tokens[:i]) for i, token in enumerate(tokens))
    assert held == make_rig(llama, token_masks=Rule(follows)).run(prompts, max_tokens=6, ignore_eos=True)


def test_a_mask_without_a_token_ends_that_request_alone(llama: Path, make_rig: MakeRig) -> None:
    rig = make_rig(llama, token_masks=Rule(lambda output: [5] if len(output) < 2 else []))
    first, second = (rig.start([1, 2, 3], max_tokens=5, ignore_eos=True) for _ in range(2))
    news = rig.finish()
    assert news[first][-1].finish_reason is FinishReason.ERROR and "masked" in (news[first][-1].error or "")
    assert [t for output in news[first] for t in output.new_token_ids] == [5, 5]
    assert sum(len(output.new_token_ids) for output in news[second]) == 5


class Drafts:
    """Proposes tokens of which the rule forbids the second."""

    def draft(self, request_id: str, token_ids: npt.NDArray[np.int32]) -> list[int]:
        return [31, 31, 32]


def test_drafts_that_a_mask_forbids_are_refused(llama: Path, make_rig: MakeRig) -> None:
    plain = make_rig(llama, token_masks=Rule(follows)).run([[1, 2]], max_tokens=6, ignore_eos=True)
    rig = make_rig(llama, token_masks=Rule(follows), drafter=Drafts(), num_spec_tokens=3)
    assert rig.run([[1, 2]], max_tokens=6, ignore_eos=True) == plain


def test_a_mask_that_ends_within_accepted_drafts_keeps_the_tokens_before_it(llama: Path, make_rig: MakeRig) -> None:
    class Fives:
        def draft(self, request_id: str, token_ids: npt.NDArray[np.int32]) -> list[int]:
            return [5, 5, 5]

    masks = Rule(lambda output: [5] if len(output) < 2 else [])
    rig = make_rig(llama, token_masks=masks, drafter=Fives(), num_spec_tokens=3)
    request_id = rig.start([1, 2, 3], max_tokens=5, ignore_eos=True)
    news = rig.finish()[request_id]
    assert [t for output in news for t in output.new_token_ids] == [5, 5]
    assert news[-1].finish_reason is FinishReason.ERROR

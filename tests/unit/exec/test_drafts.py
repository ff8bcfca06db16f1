"""Drafts under the runner: they change how many tokens a step gives, and never which."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest
from engine_rig import MakeRig, Rig

from core.exec.drafts import Proposer, count_accepted

PROMPTS = [[(7 * i + 3 * n) % 256 for i in range(5 + 11 * n)] for n in range(4)]
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "sync": {"async_scheduling": False},
    "preemption": {"force_preemption": True},
    "chunks": {"max_num_batched_tokens": 7},
}


class Planned:
    """Proposes what a request will say, changed by a function of the place."""

    def __init__(self, answers: Sequence[list[int]], change: Callable[[int], int]) -> None:
        self.whole = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
        self.change = change
        self.num_calls = 0

    def draft(self, request_id: str, token_ids: npt.NDArray[Any]) -> list[int]:
        self.num_calls += 1
        whole = self.whole[(int(request_id[1:]) - 1) % len(self.whole)]
        assert token_ids.tolist() == whole[: len(token_ids)]
        return [(t + self.change(len(token_ids) + i)) % 256 for i, t in enumerate(whole[len(token_ids) :])]


CHANGES: dict[str, Callable[[int], int]] = {
    "perfect": lambda place: 0,
    "wrong": lambda place: 1,
    "mixed": lambda place: int(place % 3 == 0),
}


@pytest.mark.parametrize(
    ("change", "settings"),
    [("perfect", "default"), ("wrong", "default"), *(("mixed", name) for name in SETTINGS)],
)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "top_k": 40, "seed": 5, "repetition_penalty": 1.3, "min_tokens": 4, "logprobs": 0},
    ],
    ids=["greedy", "sampled"],
)
def test_drafts_change_no_token_and_no_logprob(
    params: dict[str, Any], change: str, settings: str, llama: Path, make_rig: MakeRig
) -> None:
    common = {"max_tokens": 12, "ignore_eos": True, **params}
    plain = news_of(make_rig(llama), common)
    drafter = Planned([flat(outputs, "new_token_ids") for outputs in plain], CHANGES[change])
    drafted = news_of(make_rig(llama, drafter=drafter, num_spec_tokens=3, **SETTINGS[settings]), common)
    for before, after in zip(plain, drafted, strict=True):
        assert flat(before, "new_token_ids") == flat(after, "new_token_ids")
        assert [e.token_ids for e in flat(before, "new_logprobs")] == [e.token_ids for e in flat(after, "new_logprobs")]
    assert drafter.num_calls


def news_of(rig: Rig, params: dict[str, Any]) -> list[list[Any]]:
    ids = [rig.start(prompt, **params) for prompt in PROMPTS]
    news = rig.finish()
    return [news[request_id] for request_id in ids]


def flat(outputs: list[Any], name: str) -> list[Any]:
    return [entry for output in outputs for entry in getattr(output, name)]


def test_accepted_drafts_save_steps_and_wrong_ones_cost_none(llama: Path, make_rig: MakeRig) -> None:
    answers = make_rig(llama).run(PROMPTS, max_tokens=13, ignore_eos=True)
    num_steps = {}
    for name, change in CHANGES.items():
        drafter = Planned(answers, change)
        rig = make_rig(llama, drafter=drafter, num_spec_tokens=3, async_scheduling=False)
        ids = [rig.start(prompt, max_tokens=13, ignore_eos=True) for prompt in PROMPTS]
        news = rig.finish()
        num_steps[name] = max(len(news[request_id]) for request_id in ids)
    assert num_steps["perfect"] == 1 + 12 // 4
    assert num_steps["wrong"] == 13
    assert num_steps["perfect"] < num_steps["mixed"] < num_steps["wrong"]


@pytest.mark.parametrize(
    ("drafts", "sampled", "accepted"),
    [((), (5,), 0), ((5,), (5, 6), 1), ((5, 6), (5, 7, 8), 1), ((4, 6), (5, 6, 8), 0), ((5, 6), (5, 6, 8), 2)],
)
def test_the_first_wrong_draft_ends_what_is_accepted(
    drafts: tuple[int, ...], sampled: tuple[int, ...], accepted: int
) -> None:
    assert count_accepted(drafts, sampled) == accepted


class Odd:
    def __init__(self, drafts: Sequence[int] | Exception) -> None:
        self.drafts = drafts

    def draft(self, request_id: str, token_ids: npt.NDArray[Any]) -> Sequence[int]:
        if isinstance(self.drafts, Exception):
            raise self.drafts
        return self.drafts


def test_ids_outside_of_the_vocabulary_and_too_many_drafts_are_cut_off() -> None:
    tokens: Any = None
    assert Proposer(Odd([1, 2, 3, 4]), 3, 10).propose("r", tokens) == [1, 2, 3]
    assert Proposer(Odd([1, 10, 3]), 3, 10).propose("r", tokens) == [1]
    assert Proposer(Odd([-1, 3]), 3, 10).propose("r", tokens) == []


def test_a_drafter_that_fails_costs_drafts_and_nothing_else(
    llama: Path, make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    answers = make_rig(llama).run(PROMPTS, max_tokens=5, ignore_eos=True)
    with caplog.at_level(logging.CRITICAL):
        rig = make_rig(llama, drafter=Odd(RuntimeError("lost")), num_spec_tokens=3)
        assert rig.run(PROMPTS, max_tokens=5, ignore_eos=True) == answers

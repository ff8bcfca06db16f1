"""L3: speculation. Drafters that know the goldens propose the right tokens, others, or a mixture; none is believed."""

from __future__ import annotations

from typing import Any

from core_conformance.checks import check
from core_conformance.engines.drafters import GoldenDrafter, Kind
from core_conformance.engines.goldens import Golden, clear, greedy, prompt_of
from core_conformance.engines.models import ENGINE_MODELS
from core_conformance.engines.rig import NUM_SPEC_TOKENS, Comparison, Rig, compare_all, engine, golden_set, tokens_of
from core_conformance.engines.schedules import SCHEDULES, scheduled
from core_conformance.subject import Mismatch, Subject

_COUNT = 10


def _goldens(subject: Subject, model: str) -> list[Golden]:
    return golden_set(model, subject.block_size, _COUNT)


@check("L3/drafts/perfect", ENGINE_MODELS)
def test_right_drafts_are_accepted(subject: Subject, variant: str) -> None:
    """Every draft is right: the same tokens, in so many fewer steps."""
    goldens = _goldens(subject, variant)
    with engine(subject, variant, drafter=GoldenDrafter("perfect", goldens)) as rig:
        news = compare_all(subject, rig, "right drafts", goldens=goldens)
    for golden, outputs in zip(goldens, news, strict=True):
        if tokens_of(outputs) == golden.tokens and len(outputs) > 1 - -(_COUNT - 1) // (NUM_SPEC_TOKENS + 1):
            raise Mismatch(
                f"{_COUNT} tokens came in {len(outputs)} steps although up to {NUM_SPEC_TOKENS} drafts a step were "
                "right: drafts that are what the model says must be accepted"
            )


@check("L3/drafts/wrong", ENGINE_MODELS)
def test_wrong_drafts_are_refused(subject: Subject, variant: str) -> None:
    """No draft is right: the same tokens, one a step."""
    goldens = _goldens(subject, variant)
    drafter = GoldenDrafter("wrong", goldens)
    with engine(subject, variant, drafter=drafter) as rig:
        news = compare_all(subject, rig, "wrong drafts", goldens=goldens)
    assert drafter.num_proposed > 0, "nothing was drafted: the check shows nothing"
    most = max(len(output.new_token_ids) for outputs in news for output in outputs)
    if most > 1:
        raise Mismatch(f"a step gave {most} tokens although its first draft was wrong")


@check("L3/drafts/random", [f"{m}-{s}" for m in ENGINE_MODELS for s in SCHEDULES if s not in ("default", "drafts")])
def test_right_and_wrong_drafts_under_every_schedule(subject: Subject, variant: str) -> None:
    """Some drafts are right: awaited and asynchronous steps, chunks, and preemption with drafts in flight."""
    model, schedule = variant.split("-", 1)
    goldens = _goldens(subject, model)
    drafter = GoldenDrafter("random", goldens)
    with scheduled(subject, model, schedule, drafter=drafter) as rig:
        compare_all(subject, rig, f"random drafts, {schedule}", goldens=goldens)
    assert drafter.num_proposed > 0, "nothing was drafted: the check shows nothing"


@check("L3/drafts/prefix-cache", ENGINE_MODELS)
def test_refused_drafts_are_not_cached(subject: Subject, variant: str) -> None:
    """Prompts that go on where outputs with wrong drafts ended find cached blocks; these hold no refused draft."""
    whole = -(-48 // subject.block_size) * subject.block_size  # outputs that end before, with and behind a block
    firsts = [greedy(variant, prompt_of(whole - 8 + more, seed=70), 8) for more in (-1, 0, 1)]
    kinds: tuple[Kind, ...] = ("wrong", "random", "perfect")
    for kind in kinds:
        with engine(subject, variant, drafter=GoldenDrafter(kind, firsts)) as rig:
            compare_all(subject, rig, f"{kind} drafts", goldens=firsts)
            comparison = Comparison(variant, exact=variant == "copy")
            for first in firsts:
                golden = greedy(variant, (*first.prompt, *first.tokens, 1, 2), 4)
                request_id = rig.start(golden.prompt, max_tokens=4)
                comparison.check(rig, golden, tokens_of(rig.finish()[request_id]), f"behind {kind} drafts")
            comparison.close(subject)


@check("L3/drafts/ends", ["llama", "copy"])
def test_a_request_ends_within_accepted_drafts(subject: Subject, variant: str) -> None:
    """max_tokens and a stop token among accepted drafts: nothing comes behind them, and every block comes back."""
    golden = clear(variant, 44, _COUNT)
    with engine(subject, variant, drafter=GoldenDrafter("perfect", [golden])) as rig:
        for length in range(1, 8):
            _must_say(rig, golden, length, "max_tokens among drafts", max_tokens=length)
        for place in (2, 3, 4, 5):
            if golden.tokens.index(golden.tokens[place]) == place:
                stop = {"stop_token_ids": (golden.tokens[place],), "max_tokens": _COUNT}
                _must_say(rig, golden, place + 1, "a stop token among drafts", **stop)


@check("L3/drafts/abort", ENGINE_MODELS)
def test_aborts_with_drafts_in_flight(subject: Subject, variant: str) -> None:
    """A request is aborted before step 0, 1, 2, ... while its drafts are verified: the others answer, nothing leaks."""
    goldens = _goldens(subject, variant)
    with engine(subject, variant, drafter=GoldenDrafter("random", goldens)) as rig:
        comparison = Comparison(variant, exact=variant == "copy")
        for moment in range(6):
            ids = [rig.start(golden.prompt, max_tokens=_COUNT) for golden in goldens[:3]]

            def abort(step: int, at: int = moment, who: str = ids[1]) -> None:
                if step == at:
                    rig.engine.abort([who])

            news = rig.finish(abort)
            for index in (0, 2):
                comparison.check(rig, goldens[index], tokens_of(news[ids[index]]), f"an abort before step {moment}")
        comparison.close(subject)


def _must_say(rig: Rig, golden: Golden, length: int, what: str, **params: Any) -> None:
    [tokens] = rig.run([golden.prompt], **params)
    if tokens != golden.tokens[:length]:
        raise Mismatch(f"{what} of {rig.model}: got {list(tokens)}, expected {list(golden.tokens[:length])}")

"""L3: whatever the schedule, greedy tokens are those of the model alone."""

from __future__ import annotations

import random
from typing import Any

from core_conformance.checks import check
from core_conformance.engines.goldens import clear, copies, greedy, prompt_of
from core_conformance.engines.models import COPY_DISTANCE, ENGINE_MODELS
from core_conformance.engines.rig import Comparison, compare_all, engine, golden_set, tokens_of
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Mismatch, Subject
from core_conformance.tolerance import COPY_MODEL_GAP


@check("L3/copy-model")
def test_the_copy_model_has_a_wide_margin(subject: Subject) -> None:
    """Its golden is what its definition says, and no gap is below four nats: on it every honest backend is exact."""
    for length in (COPY_DISTANCE + 1, 2 * subject.block_size + COPY_DISTANCE):
        golden = greedy("copy", prompt_of(length, seed=9), COPY_DISTANCE // 2)
        assert golden.tokens == copies(golden.prompt, len(golden.tokens)), "the copy model does not copy"
        assert min(golden.gaps) >= COPY_MODEL_GAP, f"its smallest gap is {min(golden.gaps):.2f} nats"
        subject.notes["smallest_gap"] = min(golden.gaps)


@check("L3/greedy", ENGINE_MODELS, mandatory=True)
def test_greedy(subject: Subject, variant: str) -> None:
    """Prompts of one token and around the block size, together in one engine with default settings."""
    with engine(subject, variant) as rig:
        compare_all(subject, rig, "default schedule")


@check("L3/greedy-half", ["copy"], mandatory=True)
def test_greedy_in_half_precision(subject: Subject, variant: str) -> None:
    """The copy model in bfloat16, or float16 where the device has no bfloat16: exact all the same."""
    try:
        with engine(subject, variant, dtype="bfloat16") as rig:
            compare_all(subject, rig, "bfloat16")
    except UnsupportedOutcome:
        with engine(subject, variant, dtype="float16") as rig:
            compare_all(subject, rig, "float16")


@check("L3/sync", ENGINE_MODELS)
def test_without_asynchronous_scheduling(subject: Subject, variant: str) -> None:
    """Each step is awaited before the next is scheduled."""
    with engine(subject, variant, async_scheduling=False) as rig:
        compare_all(subject, rig, "async_scheduling=False")


@check("L3/chunks", [f"{m}-{n}" for m in ENGINE_MODELS for n in ("1", "7", "block", "block-plus-1")])
def test_chunk_sizes(subject: Subject, variant: str) -> None:
    """Prompts in chunks of one token, an odd number, a block and one more, decodes of others in the same steps."""
    model, name = variant.split("-", 1)
    size = subject.block_size
    budget = {"1": 1, "7": 7, "block": size, "block-plus-1": size + 1}[name]
    with engine(subject, model, max_num_batched_tokens=budget) as rig:
        if budget > 1:
            compare_all(subject, rig, f"chunks of {budget}", count=6)
            return
        golden = golden_set(model, rig.block_size, 6)[0]
        comparison = Comparison(model, exact=model == "copy")
        [tokens] = rig.run([golden.prompt], max_tokens=6)
        comparison.check(rig, golden, tokens, "chunks of 1")
        comparison.close(subject)


@check("L3/chunks/every", ["copy"])
def test_every_chunk_size(subject: Subject, variant: str) -> None:
    """From one token to more than a block, on the model that must match exactly."""
    goldens = [clear(variant, length, 3) for length in (41, 2 * subject.block_size + 40)]
    step = max(1, subject.block_size // 16)
    for budget in range(2, subject.block_size + 3, step):
        with engine(subject, variant, max_num_batched_tokens=budget) as rig:
            compare_all(subject, rig, f"chunks of {budget}", goldens=goldens)


@check("L3/batch-invariance", ENGINE_MODELS)
def test_batch_mates_do_not_show(subject: Subject, variant: str) -> None:
    """A request alone, first, last and in the middle of others: the same tokens."""
    with engine(subject, variant, cache={"enable_prefix_caching": False}) as rig:
        golden = golden_set(variant, rig.block_size, 10)[2]
        comparison = Comparison(variant, exact=variant == "copy")
        for before, after in ((0, 0), (0, 3), (3, 0), (2, 2)):
            others = [rig.start(prompt_of(40 + 9 * i, seed=i), max_tokens=6) for i in range(before)]
            mine = rig.start(golden.prompt, max_tokens=10)
            others += [rig.start(prompt_of(50 + 7 * i, seed=i), max_tokens=12) for i in range(after)]
            news = rig.finish()
            assert len(news) == len(others) + 1, "an answer is missing"
            comparison.check(rig, golden, tokens_of(news[mine]), f"{before} before and {after} behind it")
        comparison.close(subject)


_CHANGES: dict[str, dict[str, Any]] = {
    "batch": {},
    "preemption": {"force_preemption": True},
    "chunks": {"max_num_batched_tokens": 7},
}


@check("L3/seeds", _CHANGES)
def test_a_seed_gives_the_same_answer(subject: Subject, variant: dict[str, Any]) -> None:
    """Sampling with a seed: alone, among others, preempted, in chunks; another seed gives another answer."""
    prompt = prompt_of(20, seed=6)
    common: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "max_tokens": 12}
    with engine(subject, "llama") as rig:
        [alone], [again], [other] = (rig.run([prompt], seed=seed, **common) for seed in (42, 42, 43))
    if alone != again:
        raise Mismatch(f"the same seed gave {alone}, then {again}")
    assert alone != other, "two seeds gave the same twelve tokens"
    with engine(subject, "llama", **variant) as rig:
        dice = random.Random(1)
        for index in range(3):
            rig.start(prompt_of(dice.randrange(5, 40), seed=index), temperature=0.9, max_tokens=10)
        mine = rig.start(prompt, seed=42, **common)
        rig.start(prompt_of(9), temperature=0.9, max_tokens=10)
        tokens = tokens_of(rig.finish()[mine])
    if tokens != alone:
        raise Mismatch(f"seed 42 among others, {variant}: {tokens}, alone it was {alone}")

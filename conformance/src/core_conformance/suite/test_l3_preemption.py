"""L3: requests that are preempted, swapped or aborted at any step, and what they leave behind."""

from __future__ import annotations

from typing import Any

from core_conformance.checks import check
from core_conformance.goldens import greedy, prompt_of
from core_conformance.models import MODELS
from core_conformance.records import UnsupportedOutcome
from core_conformance.rig import Comparison, engine, golden_set, tokens_of
from core_conformance.subject import Mismatch, Subject
from core_conformance.suite.test_l3_greedy import compare_all

_SWAP = 1 << 27


@check("L3/preemption/recompute", [*MODELS])
def test_preempted_at_every_step(subject: Subject, variant: str) -> None:
    """A running request is preempted wherever a step allows it, and computed anew: the same tokens."""
    with engine(subject, variant, force_preemption=True) as rig:
        compare_all(subject, rig, "preempted at every step", count=8)
        _must_have_preempted(rig.engine.stats().num_preemptions)


@check("L3/preemption/recompute-sync", [*MODELS])
def test_preempted_at_every_step_without_cache(subject: Subject, variant: str) -> None:
    """The same with each step awaited, small chunks, and no prefix cache to help."""
    size = subject.block_size
    cache = {"enable_prefix_caching": False}
    options: dict[str, Any] = {"async_scheduling": False, "max_num_batched_tokens": size + 2}
    with engine(subject, variant, force_preemption=True, cache=cache, **options) as rig:
        compare_all(subject, rig, "preempted at every step, no prefix cache", count=4)
        _must_have_preempted(rig.engine.stats().num_preemptions)


@check("L3/preemption/swap", [*MODELS])
def test_swapped_at_every_step(subject: Subject, variant: str) -> None:
    """Blocks of a preempted request go to host memory and come back: the same tokens."""
    if not subject.backend.capabilities.swap:
        raise UnsupportedOutcome("capabilities.swap is False")
    cache = {"enable_prefix_caching": False, "swap_space_bytes": _SWAP}
    with engine(subject, variant, force_preemption=True, preemption_mode="swap", cache=cache) as rig:
        assert rig.runner.num_host_blocks > 0, "there is no host memory to swap to"
        compare_all(subject, rig, "swapped at every step", count=8)
        _must_have_preempted(rig.engine.stats().num_preemptions)


@check("L3/preemption/small-pool", [*MODELS])
def test_a_pool_too_small_for_all(subject: Subject, variant: str) -> None:
    """Blocks run out in the middle of the outputs: somebody waits or is preempted, nobody gets a wrong token."""
    with engine(subject, variant) as probe:
        groups, size = len(probe.runner.groups), probe.block_size
    least = -(-40 // size) if variant == "copy" else 1
    prompts = [prompt_of(least * size - 3, seed=40 + index) for index in range(5)]
    with engine(subject, variant, cache={"num_blocks": groups * 2 * (least + 2) + 1}) as rig:
        comparison = Comparison(variant, exact=variant == "copy")
        for prompt, tokens in zip(prompts, rig.run(prompts, max_tokens=8), strict=True):
            comparison.check(rig, greedy(variant, prompt, 8), tokens, "small pool")
        comparison.close(subject)


@check("L3/abort", [*MODELS])
def test_aborts_at_any_step_leak_nothing(subject: Subject, variant: str) -> None:
    """One of three requests is aborted before step 0, 1, 2, ...: the others answer, and every block comes back."""
    with engine(subject, variant, max_num_batched_tokens=subject.block_size + 3) as rig:
        golden = golden_set(variant, rig.block_size, 6)[0]
        comparison = Comparison(variant, exact=variant == "copy")
        for moment in range(8):
            mine = rig.start(golden.prompt, max_tokens=6)
            victim = rig.start(prompt_of(rig.block_size + 9, seed=moment), max_tokens=20)
            third = rig.start(prompt_of(5, seed=moment), max_tokens=4)

            def abort(step: int, at: int = moment, who: str = victim) -> None:
                if step == at:
                    rig.engine.abort([who])

            news = rig.finish(abort)
            comparison.check(rig, golden, tokens_of(news[mine]), f"another request aborted before step {moment}")
            if len(tokens_of(news[third])) != 4:
                raise Mismatch(f"a request lost tokens when another was aborted before step {moment}")
        comparison.close(subject)


@check("L3/abort/all", [*MODELS])
def test_everything_aborted_at_any_step(subject: Subject, variant: str) -> None:
    """All requests aborted before step 0 to 5, some of them preempted or swapped out: every block comes back."""
    cache = {"swap_space_bytes": _SWAP if subject.backend.capabilities.swap else 0}
    with engine(subject, variant, force_preemption=True, preemption_mode="swap", cache=cache) as rig:
        for moment in range(6):
            ids = [rig.start(prompt_of(9 + 5 * index, seed=index), max_tokens=12) for index in range(3)]

            def abort(step: int, at: int = moment, who: tuple[str, ...] = tuple(ids)) -> None:
                if step == at:
                    rig.engine.abort(who)

            rig.finish(abort)
        compare_all(subject, rig, "after everything was aborted", count=4)


def _must_have_preempted(count: int) -> None:
    assert count > 0, "nothing was preempted: the check shows nothing"

"""L3: requests that are preempted, swapped or aborted at any step, and what they leave behind."""

from __future__ import annotations

from typing import Any

from core_conformance.checks import check
from core_conformance.engines.goldens import greedy, prompt_of
from core_conformance.engines.models import ENGINE_MODELS
from core_conformance.engines.rig import Comparison, compare_all, engine, golden_set, tokens_of
from core_conformance.engines.schedules import SWAP_SPACE, need_swap
from core_conformance.subject import Mismatch, Subject


@check("L3/preemption/recompute", ENGINE_MODELS)
def test_preempted_at_every_step(subject: Subject, variant: str) -> None:
    """A running request is preempted wherever a step allows it, and computed anew: the same tokens."""
    with engine(subject, variant, force_preemption=True) as rig:
        compare_all(subject, rig, "preempted at every step", count=8)
        _must_have_preempted(rig.engine.stats().num_preemptions)


@check("L3/preemption/recompute-sync", ENGINE_MODELS)
def test_preempted_at_every_step_without_cache(subject: Subject, variant: str) -> None:
    """The same with each step awaited, small chunks, and no prefix cache to help."""
    size = subject.block_size
    cache = {"enable_prefix_caching": False}
    options: dict[str, Any] = {"async_scheduling": False, "max_num_batched_tokens": size + 2}
    with engine(subject, variant, force_preemption=True, cache=cache, **options) as rig:
        compare_all(subject, rig, "preempted at every step, no prefix cache", count=4)
        _must_have_preempted(rig.engine.stats().num_preemptions)


@check("L3/preemption/swap", ENGINE_MODELS)
def test_swapped_at_every_step(subject: Subject, variant: str) -> None:
    """Blocks of a preempted request go to host memory and come back: the same tokens."""
    need_swap(subject)
    cache = {"enable_prefix_caching": False, "swap_space_bytes": SWAP_SPACE}
    with engine(subject, variant, force_preemption=True, preemption_mode="swap", cache=cache) as rig:
        assert rig.runner.num_host_blocks > 0, "there is no host memory to swap to"
        compare_all(subject, rig, "swapped at every step", count=8)
        _must_have_preempted(rig.engine.stats().num_preemptions)


@check("L3/preemption/small-pool", ENGINE_MODELS)
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


@check("L3/abort", ENGINE_MODELS)
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


@check("L3/abort/all", ENGINE_MODELS)
def test_everything_aborted_at_any_step(subject: Subject, variant: str) -> None:
    """All requests aborted before step 0 to 5, some of them preempted or swapped out: every block comes back."""
    cache = {"swap_space_bytes": SWAP_SPACE if subject.backend.capabilities.swap else 0}
    with engine(subject, variant, force_preemption=True, preemption_mode="swap", cache=cache) as rig:
        for moment in range(6):
            ids = [rig.start(prompt_of(9 + 5 * index, seed=index), max_tokens=12) for index in range(3)]

            def abort(step: int, at: int = moment, who: tuple[str, ...] = tuple(ids)) -> None:
                if step == at:
                    rig.engine.abort(who)

            rig.finish(abort)
        compare_all(subject, rig, "after everything was aborted", count=4)


_LIVES: dict[str, dict[str, Any]] = {
    "waiting": {"max_num_seqs": 1},
    "prefill": {"max_num_batched_tokens": 5, "async_scheduling": False},
    "decode": {"async_scheduling": False},
    "in-flight": {},
    "preempted": {"force_preemption": True},
    "swapped": {"force_preemption": True, "preemption_mode": "swap", "cache": {"swap_space_bytes": SWAP_SPACE}},
}


@check("L3/abort/life", _LIVES.keys())
def test_aborts_at_every_point_of_a_life(subject: Subject, variant: str) -> None:
    """While it waits, is computed, decodes, has a step in flight, was preempted or swapped out; twice, and too late."""
    options = _LIVES[variant]
    if "cache" in options:
        need_swap(subject)
    first = greedy("llama", prompt_of(9, seed=91), 8)
    with engine(subject, "llama", **options) as rig:
        comparison = Comparison("llama")
        for moment in range(10):
            mine = rig.start(first.prompt, max_tokens=8)
            victims = [rig.start(prompt_of(13 + 4 * index, seed=92), max_tokens=12) for index in range(2)]

            def abort(step: int, at: int = moment, who: tuple[str, ...] = tuple(victims)) -> None:
                if step == at:
                    rig.engine.abort(who)
                if step == at + 1:
                    rig.engine.abort([*who, "nobody"])

            news = rig.finish(abort)
            rig.engine.abort([mine, *victims])
            comparison.check(rig, first, tokens_of(news[mine]), f"{variant}: others aborted before step {moment}")
        comparison.close(subject)


def _must_have_preempted(count: int) -> None:
    assert count > 0, "nothing was preempted: the check shows nothing"

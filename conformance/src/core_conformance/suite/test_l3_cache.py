"""L3: the prefix cache, off, cold, warm and partial: what is reused, and that it is the right thing."""

from __future__ import annotations

from collections.abc import Sequence

from core_conformance.checks import check
from core_conformance.engines.goldens import greedy, prompt_of
from core_conformance.engines.models import ENGINE_MODELS
from core_conformance.engines.rig import Comparison, Rig, compare_all, engine, golden_set, tokens_of
from core_conformance.subject import Mismatch, Subject

_COUNT = 6


class _Asked:
    """Runs prompts one after the other and compares tokens and the number of cached ones."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.comparison = Comparison(rig.model, exact=rig.model == "copy")

    def ask(self, prompt: Sequence[int], cached: int, what: str, salt: str | None = None) -> None:
        """Asserts that exactly `cached` tokens are found, and the golden's tokens."""
        golden = greedy(self.rig.model, tuple(prompt), _COUNT)
        request_id = self.rig.start(prompt, max_tokens=_COUNT, cache_salt=salt)
        news = self.rig.finish()[request_id]
        found = news[0].num_cached_tokens
        if found != cached:
            raise Mismatch(
                f"prefix cache, {what}: {found} of {len(prompt)} prompt tokens were found, expected {cached}"
            )
        self.comparison.check(self.rig, golden, tokens_of(news), what)


@check("L3/prefix-cache/off", ENGINE_MODELS)
def test_off(subject: Subject, variant: str) -> None:
    """Without a prefix cache nothing is found, and a second run gives the same."""
    with engine(subject, variant, cache={"enable_prefix_caching": False}) as rig:
        asked = _Asked(rig)
        prompt = _part(rig, 2) + prompt_of(3)
        asked.ask(prompt, 0, "off")
        asked.ask(prompt, 0, "off, again")
        asked.comparison.close(subject)


@check("L3/prefix-cache/warm", ENGINE_MODELS)
def test_cold_and_warm(subject: Subject, variant: str) -> None:
    """The golden prompts twice in the same engine, all at once; the second time full blocks are found."""
    with engine(subject, variant) as rig:
        compare_all(subject, rig, "cold cache", count=_COUNT)
        asked = _Asked(rig)
        for golden in golden_set(variant, rig.block_size, _COUNT):
            cached = (len(golden.prompt) - 1) // rig.block_size * rig.block_size
            asked.ask(golden.prompt, cached, "warm cache")
        asked.comparison.close(subject)


@check("L3/prefix-cache/partial", ENGINE_MODELS)
def test_partial(subject: Subject, variant: str) -> None:
    """A prompt that shares its first block with an earlier one, and one that shares all but its end."""
    with engine(subject, variant) as rig:
        asked, size = _Asked(rig), rig.block_size
        first = _part(rig, 3) + prompt_of(2)
        asked.ask(first, 0, "cold")
        asked.ask(first[:size] + prompt_of(size + 5, seed=8), size, "one block shared")
        asked.ask(first[: 2 * size + 3] + prompt_of(9, seed=9), 2 * size, "two blocks and a bit shared")
        asked.ask(first[: 3 * size - 2] + prompt_of(size, seed=10), 2 * size, "all but the end of a block shared")
        asked.comparison.close(subject)


@check("L3/prefix-cache/full", ENGINE_MODELS)
def test_full_hit(subject: Subject, variant: str) -> None:
    """A prompt that ends with a block: its last token is computed again all the same, for its logits."""
    with engine(subject, variant) as rig:
        asked, size = _Asked(rig), rig.block_size
        prompt = _part(rig, 3)
        asked.ask(prompt, 0, "cold")
        asked.ask(prompt, len(prompt) - size, "full hit")
        asked.ask(prompt, len(prompt) - size, "full hit, again")
        asked.comparison.close(subject)


@check("L3/prefix-cache/salt", ENGINE_MODELS)
def test_salts_separate(subject: Subject, variant: str) -> None:
    """The same salt hits; another one, an empty one and none at all do not."""
    with engine(subject, variant) as rig:
        asked, size = _Asked(rig), rig.block_size
        prompt = _part(rig, 2) + prompt_of(3)
        hit = len(prompt) // size * size
        for salt, cached in (("S", 0), ("S", hit), ("T", 0), (None, 0), ("", 0), (None, hit)):
            asked.ask(prompt, cached, f"salt {salt!r}", salt)
        asked.comparison.close(subject)


@check("L3/prefix-cache/parent", ENGINE_MODELS)
def test_a_block_is_only_found_behind_its_own_prefix(subject: Subject, variant: str) -> None:
    """Blocks of the same tokens behind other tokens are other blocks."""
    with engine(subject, variant) as rig:
        asked, size = _Asked(rig), rig.block_size
        head = _part(rig, 1)
        a, b, c = (head + prompt_of(size, seed=seed) for seed in (21, 22, 23))
        tail = prompt_of(size, seed=24)
        start = len(a) // size * size
        asked.ask(a + tail + (1,), 0, "first prefix")
        asked.ask(c + b, start - size, "second prefix")
        asked.ask(c + tail + (1,), start, "tail of the first behind the second prefix")
        asked.comparison.close(subject)


@check("L3/prefix-cache/shared", ENGINE_MODELS)
def test_blocks_shared_by_running_requests(subject: Subject, variant: str) -> None:
    """Requests that share cached blocks end one after the other while new ones want blocks: nobody loses any."""
    with engine(subject, variant) as probe:
        groups = len(probe.runner.groups)
        blocks = 4 if variant != "copy" else 4 + 40 // probe.block_size
    with engine(subject, variant, cache={"num_blocks": groups * 4 * blocks + 1}) as rig:
        comparison = Comparison(variant, exact=variant == "copy")
        head = _part(rig, 2)
        rig.run([(*head, 1)], max_tokens=1)
        prompts = [head + prompt_of(3 + index, seed=50 + index) for index in range(3)]
        ids = [rig.start(prompt, max_tokens=1 + 4 * index) for index, prompt in enumerate(prompts)]
        others = {3: prompt_of(len(head) - 1, seed=60), 5: prompt_of(len(head) - 2, seed=61)}
        late: list[str] = []

        def more(step: int) -> None:
            if step in others:
                late.append(rig.start(others[step], max_tokens=4))

        news = rig.finish(more)
        for index, (prompt, request_id) in enumerate(zip(prompts, ids, strict=True)):
            golden = greedy(variant, prompt, 1 + 4 * index)
            comparison.check(rig, golden, tokens_of(news[request_id]), "prefix shared with running requests")
        for prompt, request_id in zip(others.values(), late, strict=True):
            comparison.check(rig, greedy(variant, prompt, 4), tokens_of(news[request_id]), "beside shared prefixes")
        comparison.close(subject)


@check("L3/prefix-cache/evicted", ENGINE_MODELS)
def test_eviction_under_pressure(subject: Subject, variant: str) -> None:
    """A pool of few blocks, in which cached prefixes are evicted again and again, never gives a wrong token."""
    with engine(subject, variant) as probe:
        groups = len(probe.runner.groups)
    with engine(subject, variant, cache={"num_blocks": 8 * groups + 1}) as rig:
        comparison = Comparison(variant, exact=variant == "copy")
        # Beginnings differ: blocks that all share would never be evicted.
        prompts = [prompt_of(len(_part(rig, 2)) + 3 + seed, seed=30 + seed) for seed in range(4)]
        for index in (0, 1, 2, 3, 0, 1, 0, 3):
            [tokens] = rig.run([prompts[index]], max_tokens=_COUNT)
            comparison.check(rig, greedy(variant, prompts[index], _COUNT), tokens, "after evictions")
        comparison.close(subject)


def _part(rig: Rig, blocks: int) -> tuple[int, ...]:
    """A prompt of whole blocks; the copy model's is longer than its distance."""
    least = -(-40 // rig.block_size) if rig.model == "copy" else 0
    return prompt_of(max(blocks, least) * rig.block_size, seed=7)

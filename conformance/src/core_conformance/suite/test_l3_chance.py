"""L3: schedules made by chance: arrivals, aborts, budgets and pools that nobody thought of."""

from __future__ import annotations

import random
from typing import Any

from core_conformance.checks import check
from core_conformance.engines.chance import chance_seed
from core_conformance.engines.drafters import GoldenDrafter
from core_conformance.engines.goldens import Golden, greedy, prompt_of
from core_conformance.engines.models import ENGINE_MODELS
from core_conformance.engines.rig import Comparison, Rig, engine
from core_conformance.engines.schedules import SWAP_SPACE
from core_conformance.subject import Mismatch, Subject

_COUNT = 8
_NUM_REQUESTS = 14


@check("L3/chance", [f"{m}-{n}" for m in ENGINE_MODELS for n in ("a", "b", "c")])
def test_schedules_by_chance(subject: Subject, variant: str) -> None:
    """Requests come in any step and some are aborted; all others say what the golden says, and nothing leaks."""
    model, name = variant.split("-")
    dice = random.Random(f"{chance_seed()} {variant}")
    goldens = _goldens(subject, model)
    options = _options(subject, dice)
    subject.notes["chance"] = chance_seed()
    if dice.random() < 0.5:
        options["drafter"] = GoldenDrafter("random", goldens)
    with engine(subject, model, **options) as rig:
        comparison = Comparison(model, exact=model == "copy")
        _run(rig, dice, goldens, comparison, f"schedule {name} of chance {chance_seed()}: {options}")
        comparison.close(subject)


def _goldens(subject: Subject, model: str) -> list[Golden]:
    """Prompts that share beginnings; which they are does not depend on chance."""
    size, head = subject.block_size, prompt_of(2 * subject.block_size + 40, seed=81)
    least = 40 if model == "copy" else 1
    cuts = {least: 1, least + 5: 3, size + 2: 9, size + least: 2, 2 * size: 4}
    return [greedy(model, head[: max(cut, least)] + prompt_of(own, seed=82), _COUNT) for cut, own in cuts.items()]


def _options(subject: Subject, dice: random.Random) -> dict[str, Any]:
    swap = subject.backend.capabilities.swap and dice.random() < 0.5
    return {
        "async_scheduling": dice.random() < 0.7,
        "force_preemption": dice.random() < 0.4,
        "preemption_mode": "swap" if swap else "recompute",
        "max_num_seqs": dice.randint(1, 6),
        "max_num_batched_tokens": dice.choice((4, 9, subject.block_size + 1, 200)),
        "cache": {
            "enable_prefix_caching": dice.random() < 0.7,
            "num_blocks": dice.choice((30, 45, 96)),
            "swap_space_bytes": SWAP_SPACE if swap else 0,
        },
    }


def _run(rig: Rig, dice: random.Random, goldens: list[Golden], comparison: Comparison, what: str) -> None:
    arrivals = sorted(dice.randrange(40) for _ in range(_NUM_REQUESTS))
    running: dict[str, tuple[Golden, int]] = {}
    aborted: set[str] = set()
    news: dict[str, tuple[int, ...]] = {}
    step = 0
    while arrivals or rig.engine.has_work():
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            golden, count = dice.choice(goldens), dice.randint(1, _COUNT)
            running[rig.start(golden.prompt, max_tokens=count)] = (golden, count)
        if running and dice.random() < 0.06:
            victim = dice.choice(sorted(running))
            aborted.add(victim)
            rig.engine.abort([victim])
        for output in rig.step():
            if output.request_id in aborted:
                raise Mismatch(f"{what}: {output.request_id} was aborted and still has news")
            news[output.request_id] = news.get(output.request_id, ()) + output.new_token_ids
        step += 1
    rig.must_be_empty()
    for request_id, (golden, count) in running.items():
        if request_id not in aborted:
            wanted = Golden(golden.prompt, golden.tokens[:count], golden.gaps[:count])
            comparison.check(rig, wanted, news.get(request_id, ()), what)

"""L4: many clients at once, and many one after another, after which nothing is left of any."""

from __future__ import annotations

import random
from dataclasses import asdict

from core_conformance.checks import check
from core_conformance.records import Findings
from core_conformance.served.copying import copy_prompt
from core_conformance.served.leaks import footprint, must_not_grow
from core_conformance.served.load import Ask, answers, soak, stream_all, wait_idle
from core_conformance.served.server import Server
from core_conformance.served.setups import Servers
from core_conformance.subject import Mismatch

_STREAMS = 64


@check("L4/streams", ["completions", "chat", "mixed"])
def test_64_streams_at_once(server: Server, findings: Findings, variant: str) -> None:
    """Every one of 64 streams of different lengths is what the copy model must say, and all blocks come back."""
    dice = random.Random(len(variant))
    asks = [
        Ask(
            prompt=copy_prompt(dice.randrange(40, 170), seed=100 + index),
            max_tokens=dice.randrange(20, 76),
            chat=variant == "chat" or (variant == "mixed" and index % 2 == 1),
        )
        for index in range(_STREAMS)
    ]
    heard = stream_all(server, asks)
    findings.notes["right"] = answers(asks, heard, variant)
    findings.notes["tokens"] = sum(ask.max_tokens for ask in asks)
    wait_idle(server, "after 64 streams")


@check("L4/streams/left")
def test_64_streams_of_which_some_are_left(server: Server, findings: Findings) -> None:
    """A third of 64 clients goes away at a random event; the others hear the right answer to its end."""
    dice = random.Random(64)
    asks = [
        Ask(
            prompt=copy_prompt(dice.randrange(40, 170), seed=300 + index),
            max_tokens=75,
            chat=index % 2 == 1,
            leave_after=dice.randrange(1, 40) if index % 3 == 0 else None,
            delay_s=dice.random() * 0.3,
        )
        for index in range(_STREAMS)
    ]
    heard = stream_all(server, asks)
    findings.notes["right"] = answers(asks, heard, "beside clients that left")
    findings.notes["left"] = sum(one.left for one in heard)
    wait_idle(server, "after 64 streams of which some were left")


@check("L4/soak")
def test_soak(server: Server, servers: Servers, findings: Findings) -> None:
    """Short requests for a while, a third of them left at random: every answer is right, and the server afterwards
    holds what it held before: no KV block, and no more memory, descriptors, threads and processes than allowed."""
    seconds = servers.options.soak_seconds
    soak(server, max(2.0, seconds / 4), seed=1)  # pools of threads and caches fill up before the measurement begins
    wait_idle(server, "after the warm-up of the soak")
    before = footprint(server)
    counts = soak(server, seconds, seed=2)
    metrics = wait_idle(server, f"after a soak of {counts.requests} requests")
    after, worst, findings.ratio = must_not_grow(before, lambda: footprint(server))
    findings.notes |= {
        "requests": counts.requests,
        **{name.replace(" ", "_"): number for name, number in sorted(counts.ended.items())},
        "kv_usage": metrics["vllm:kv_cache_usage_perc"],
        "before": asdict(before),
        "after": asdict(after),
        "worst": worst,
    }
    if counts.requests < 10 or not counts.ended["left"]:
        raise Mismatch(f"the soak came to {dict(counts.ended)} in {seconds:g} s: too few to show anything")

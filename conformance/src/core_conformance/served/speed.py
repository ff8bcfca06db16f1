"""How fast a server decodes and prefills, from the client's side."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass

from core_conformance.served.server import MODEL_NAME, Server
from core_conformance.subject import Mismatch

__all__ = ["Speed", "decode_speed", "prefill_speed"]


@dataclass(frozen=True)
class Speed:
    """The best of some runs.

    Args:
        tokens_per_s: Tokens a second.
        runs: All of them, in order.
    """

    tokens_per_s: float
    runs: tuple[float, ...]


def _body(prompt_tokens: int, max_tokens: int, seed: int) -> dict[str, object]:
    dice = random.Random(seed)
    prompt = [dice.randrange(256) for _ in range(prompt_tokens)]
    common = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    return {**common, "prompt": prompt, "max_tokens": max_tokens}


def _stream(server: Server, body: dict[str, object]) -> list[tuple[float, int]]:
    """(seconds since the request, tokens so far) of each event with tokens."""
    begin, seen, count = time.perf_counter(), list[tuple[float, int]](), 0
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise Mismatch(f"the server answers with status {reply.status_code}: {reply.read()[:300]!r}")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                new = sum(len(c.get("token_ids") or ()) for c in json.loads(line.removeprefix("data: "))["choices"])
                count += new
                if new:
                    seen.append((time.perf_counter() - begin, count))
    if count != body["max_tokens"]:
        raise Mismatch(f"{body['max_tokens']} tokens were asked for, and {count} came")
    return seen


def decode_speed(server: Server, *, prompt_tokens: int = 16, max_tokens: int = 24, runs: int = 3) -> Speed:
    """Tokens a second of one stream, its first token left out."""
    _stream(server, _body(prompt_tokens, 4, seed=0))
    found = []
    for run in range(runs):
        seen = _stream(server, _body(prompt_tokens, max_tokens, seed=run + 1))
        (first, before), (last, count) = seen[0], seen[-1]
        found.append((count - before) / (last - first))
    return Speed(max(found), tuple(found))


def prefill_speed(server: Server, *, prompt_tokens: int = 512, runs: int = 2) -> Speed:
    """Prompt tokens a second until the first token of one request; the prefix cache is off at this server."""
    _stream(server, _body(prompt_tokens, 1, seed=100))
    found = []
    for run in range(runs):
        [(first, _)] = _stream(server, _body(prompt_tokens, 1, seed=101 + run))
        found.append(prompt_tokens / first)
    return Speed(max(found), tuple(found))

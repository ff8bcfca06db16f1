"""Many clients at once: streams of the copy model whose answers are known, clients that leave, and short requests."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from core_conformance.engines.models import COPY_DISTANCE
from core_conformance.served.copying import copy_answer, copy_prompt
from core_conformance.served.server import MODEL_NAME, PLAIN, Server
from core_conformance.subject import Mismatch

__all__ = ["Ask", "Heard", "SoakCounts", "answers", "num_aborted", "soak", "stream_all", "wait_idle"]

IDLE_S = 30.0
"""Patience with a server that should have nothing left to do."""
_PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request for a copy.

    Args:
        prompt: Text.
        max_tokens: Length of the answer.
        chat: Whether it goes to chat completions.
        leave_after: Events after which the client closes its connection; None reads to the end.
        leave_after_s: Seconds after which it does, whatever has come; None waits.
        delay_s: Seconds before it is sent.
    """

    prompt: str
    max_tokens: int
    chat: bool = False
    leave_after: int | None = None
    leave_after_s: float | None = None
    delay_s: float = 0.0

    @property
    def path(self) -> str:
        """The route."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, *, stream: bool = True) -> dict[str, object]:
        """The request."""
        given: dict[str, object] = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {}
        if not self.chat:
            given = {"prompt": self.prompt}
        common = {"model": MODEL_NAME, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        return {**given, **common, "stream": stream}


@dataclass
class Heard:
    """What a client got."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    done: bool = False
    left: bool = False
    error: str = ""
    retry_after: str | None = None
    events: int = field(default=0)


async def _listen(client: httpx.AsyncClient, ask: Ask) -> Heard:
    await asyncio.sleep(ask.delay_s)
    heard = Heard()
    try:
        async with asyncio.timeout(ask.leave_after_s):
            await _read(client, ask, heard)
    except TimeoutError:
        heard.left = True
    return heard


async def _read(client: httpx.AsyncClient, ask: Ask, heard: Heard) -> None:
    async with client.stream("POST", ask.path, json=ask.body()) as reply:
        heard.status, heard.retry_after = reply.status_code, reply.headers.get("retry-after")
        if heard.status != 200:
            heard.error = (await reply.aread()).decode("utf-8", "replace")
            return
        async for line in reply.aiter_lines():
            if ask.leave_after is not None and heard.events >= ask.leave_after:
                heard.left = True
                return
            _take(heard, line)


def _take(heard: Heard, line: str) -> None:
    if not line.startswith("data: "):
        return
    if line == "data: [DONE]":
        heard.done = True
        return
    event = json.loads(line.removeprefix("data: "))
    heard.events += 1
    if "error" in event:
        heard.error = json.dumps(event["error"])
        return
    for choice in event["choices"]:
        heard.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        heard.finish_reason = choice["finish_reason"] or heard.finish_reason


def stream_all(server: Server, asks: Sequence[Ask]) -> list[Heard]:
    """Sends all requests at once, each on a connection of its own, and listens to every stream."""

    async def run() -> list[Heard]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=_PATIENCE_S, limits=limits, **PLAIN) as client:
            return await asyncio.gather(*(_listen(client, ask) for ask in asks))

    return asyncio.run(run())


def answers(asks: Sequence[Ask], heard: Sequence[Heard], what: str) -> int:
    """Number of right answers; clients that left must have heard the beginning of theirs.

    Raises:
        Mismatch: naming the first stream that is wrong.
    """
    num_right = 0
    for number, (ask, one) in enumerate(zip(asks, heard, strict=True)):
        expected = copy_answer(ask.prompt, ask.max_tokens)
        where = f"{what}: stream {number} of {len(asks)}"
        if one.left and one.status == 0:
            continue
        if one.status != 200 or one.error:
            raise Mismatch(f"{where} failed with status {one.status}: {one.error[:300]}")
        if one.left:
            if not expected.startswith(one.text):
                raise Mismatch(f"{where}, left early, heard {one.text!r}; {expected!r} was to come")
            continue
        if one.text != expected:
            raise Mismatch(f"{where} is {one.text!r}, expected {expected!r}")
        if not one.done or one.finish_reason != "length":
            raise Mismatch(f"{where} ended with {one.finish_reason!r}, [DONE] {one.done}; expected 'length' and [DONE]")
        num_right += 1
    return num_right


def wait_idle(server: Server, what: str, patience_s: float = IDLE_S) -> dict[str, float]:
    """Returns the metrics when no request is left and every KV block is free again.

    Raises:
        Mismatch: that does not come to be; names the gauges that are not zero.
    """
    deadline = time.monotonic() + patience_s
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while True:
        metrics = server.metrics()
        held = {name: metrics[name] for name in gauges if metrics[name]}
        if load := server.get("/load").json()["server_load"]:
            held["/load"] = float(load)
        if not held:
            return metrics
        if time.monotonic() > deadline:
            raise Mismatch(f"{what}: {patience_s:g} s after the last request the server still holds {held}")
        time.sleep(0.05)


def num_aborted(server: Server) -> float:
    """Requests that /metrics counts as aborted."""
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("vllm:request_success_total") and 'finished_reason="abort"' in line:
            return float(line.rpartition(" ")[2])
    raise Mismatch("/metrics has no vllm:request_success_total with finished_reason abort")


@dataclass
class SoakCounts:
    """What a soak did."""

    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter)


def soak(server: Server, seconds: float, *, seed: int, clients: int = 12) -> SoakCounts:
    """Short requests from some clients for so long; a third of them leaves early, some before the first token.

    Raises:
        Mismatch: an answer is wrong.
    """
    counts, deadline = SoakCounts(), time.monotonic() + seconds

    async def one(client: httpx.AsyncClient, dice: random.Random) -> None:
        leave = dice.choice((0, 1, dice.randrange(2, 20))) if dice.random() < 1 / 3 else None
        length = dice.randrange(COPY_DISTANCE + 1, 160)
        prompt = copy_prompt(length, seed=dice.randrange(1 << 30))
        ask = Ask(prompt=prompt, max_tokens=dice.randrange(1, 24), chat=dice.random() < 0.3, leave_after=leave)
        if leave == 0:
            await _leave_at_once(client, ask, dice.random() * 0.01)
            counts.ended["left before the first token"] += 1
        else:
            heard = await _listen(client, ask)
            answers([ask], [heard], "soak")
            counts.ended["left" if heard.left else "answered"] += 1
        counts.requests += 1

    async def worker(number: int) -> None:
        dice = random.Random(1000 * seed + number)
        limits = httpx.Limits(max_keepalive_connections=1)
        async with httpx.AsyncClient(base_url=server.url, timeout=_PATIENCE_S, limits=limits, **PLAIN) as client:
            while time.monotonic() < deadline:
                await one(client, dice)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(worker(number))

    try:
        asyncio.run(run())
    except* Mismatch as wrong:
        raise wrong.exceptions[0] from None
    return counts


async def _leave_at_once(client: httpx.AsyncClient, ask: Ask, after_s: float) -> None:
    """Sends a request that is not streamed and closes the connection before its answer can have come."""
    task = asyncio.create_task(client.post(ask.path, json=ask.body(stream=False)))
    await asyncio.wait([task], timeout=after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

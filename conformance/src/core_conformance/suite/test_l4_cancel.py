"""L4: a client that goes away takes its request along: it ends, and its KV blocks come back."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from core_conformance.checks import check
from core_conformance.records import Findings
from core_conformance.served.copying import copy_answer, copy_prompt
from core_conformance.served.load import num_aborted, wait_idle
from core_conformance.served.server import MODEL_NAME, Server
from core_conformance.subject import Mismatch

_LONG = 6000
"""Tokens of an answer that nobody waits for: far more than can be made before the client is gone."""
_PATIENCE_S = 60.0


def _body(**more: Any) -> dict[str, Any]:
    common = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "max_tokens": _LONG}
    return {**common, "prompt": copy_prompt(90, seed=5), **more}


def _must_end_early(
    server: Server, before: dict[str, float], aborted: float, findings: Findings, *, asked: int = _LONG
) -> None:
    """Idle again, with fewer tokens than the whole answers have, and counted as aborted."""
    begin = time.monotonic()
    after = wait_idle(server, "after its clients have gone", _PATIENCE_S)
    made = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    findings.notes |= {"tokens_made": made, "idle_after_s": round(time.monotonic() - begin, 3)}
    if made >= asked:
        raise Mismatch(f"{made:.0f} tokens were made for a client that had gone, all that it had asked for")
    counted = num_aborted(server) - aborted
    if counted != 1:
        raise Mismatch(f"/metrics counts {counted:.0f} aborted requests, 1 was left")
    _must_still_answer(server)


def _must_still_answer(server: Server) -> None:
    prompt = copy_prompt(70, seed=6)
    body = _body(prompt=prompt, max_tokens=10)
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    if text != copy_answer(prompt, 10):
        raise Mismatch(f"after an aborted request the next one gets {text!r}, expected {copy_answer(prompt, 10)!r}")


def _wait_running(server: Server, count: int = 1) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while server.metrics()["vllm:num_requests_running"] < count:
        if time.monotonic() > deadline:
            raise Mismatch(f"{count} request(s) never showed as running in /metrics")
        time.sleep(0.01)


@check("L4/cancel/stream", ["completions", "chat"])
def test_a_stream_left_in_the_middle(server: Server, findings: Findings, variant: str) -> None:
    """The client reads three events and closes its connection."""
    before, aborted = wait_idle(server, "before"), num_aborted(server)
    body = _body(stream=True)
    path = "/v1/completions"
    if variant == "chat":
        path, body = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": body.pop("prompt")}]}
    with server.client() as client, client.stream("POST", path, json=body) as reply:
        lines = reply.iter_lines()
        for _ in range(6):
            next(lines)
    _must_end_early(server, before, aborted, findings)


@check("L4/cancel/stream-choices")
def test_a_stream_of_several_choices(server: Server, findings: Findings) -> None:
    """Four choices of one request end together."""
    body = _body(stream=True, n=4, max_tokens=_LONG // 2)
    before, aborted = wait_idle(server, "before"), num_aborted(server)
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    _must_end_early(server, before, aborted, findings, asked=4 * body["max_tokens"])


@check("L4/cancel/plain")
def test_an_answer_that_is_not_streamed(server: Server, findings: Findings) -> None:
    """The client waits for its whole answer and gives up."""
    before, aborted = wait_idle(server, "before"), num_aborted(server)
    _send_and_close(server, _body(), wait=lambda: _wait_running(server))
    _must_end_early(server, before, aborted, findings)


@check("L4/cancel/reset")
def test_a_connection_that_is_reset(server: Server, findings: Findings) -> None:
    """The client's end of the connection is reset instead of closed, in the middle of a stream."""
    before, aborted = wait_idle(server, "before"), num_aborted(server)
    _send_and_close(server, _body(stream=True), wait=lambda: _wait_running(server), reset=True)
    _must_end_early(server, before, aborted, findings)


def _send_and_close(server: Server, body: dict[str, Any], *, wait: Callable[[], None], reset: bool = False) -> None:
    """Sends a completion over a bare connection, waits, and closes or resets it without reading."""
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + raw)
        wait()
        if reset:  # with no time to linger the kernel sends RST in place of FIN
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

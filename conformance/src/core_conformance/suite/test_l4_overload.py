"""L4: more than a server can hold: it says so, or it takes longer, and it is never wrong."""

from __future__ import annotations

import json
import random
import signal
import threading
import time

from core_conformance.checks import check
from core_conformance.records import Findings
from core_conformance.served.copying import copy_prompt
from core_conformance.served.load import Ask, Heard, answers, num_aborted, stream_all, wait_idle
from core_conformance.served.server import MODEL_NAME, Server
from core_conformance.served.setups import SMALL_QUEUE, Servers
from core_conformance.served.wire import ErrorBody, parse
from core_conformance.subject import Mismatch

_RUNNING = 8
"""`--max-num-seqs` of the small server."""


def _asks(count: int, *, seed: int, length: int = 180, max_tokens: int = 75) -> list[Ask]:
    return [Ask(prompt=copy_prompt(length, seed=seed + index), max_tokens=max_tokens) for index in range(count)]


@check("L4/overload/small-pool")
def test_a_pool_too_small_for_all(small_server: Server, findings: Findings) -> None:
    """Eight streams over blocks for two or three of them: they wait or are preempted, and every answer is right."""
    before = wait_idle(small_server, "before")
    asks = _asks(8, seed=400, length=120)
    findings.notes["right"] = answers(asks, stream_all(small_server, asks), "a pool that is too small")
    after = wait_idle(small_server, "after an overload of the pool")
    name = "vllm:num_preemptions_total"
    findings.notes["preemptions"] = after[name] - before[name]


@check("L4/cancel/queued")
def test_a_request_that_waits(small_server: Server, findings: Findings) -> None:
    """One that is queued ends before it began, and those in front of it go on to their right end."""
    before, aborted = wait_idle(small_server, "before"), num_aborted(small_server)
    asks = [Ask(prompt=copy_prompt(180, seed=20 + index), max_tokens=76) for index in range(7)]
    victim = Ask(prompt=copy_prompt(180, seed=50), max_tokens=76, delay_s=0.1, leave_after_s=0.1)
    heard = stream_all(small_server, [*asks, victim])
    answers(asks, heard[:-1], "beside a queued request that was left")
    after = wait_idle(small_server, "after a queued request was left")
    findings.notes["aborted"] = num_aborted(small_server) - aborted
    if findings.notes["aborted"] != 1:
        raise Mismatch(f"/metrics counts {findings.notes['aborted']:.0f} aborted requests, 1 was left")
    made = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    if made != 76 * len(asks):
        raise Mismatch(f"{made:.0f} tokens were made, {76 * len(asks)} by requests that were heard to their end")


@check("L4/overload/queue-full")
def test_a_full_queue_is_said_at_once(small_server: Server, findings: Findings) -> None:
    """Forty requests where eight may run and eight may wait: some get 429 with Retry-After, the others are right."""
    wait_idle(small_server, "before")
    asks = _asks(40, seed=500, max_tokens=60)
    heard = stream_all(small_server, asks)
    refused = [one for one in heard if one.status == 429]
    taken = [(ask, one) for ask, one in zip(asks, heard, strict=True) if one.status != 429]
    findings.notes |= {"refused": len(refused), "taken": len(taken)}
    answers([ask for ask, _ in taken], [one for _, one in taken], "beside requests that were refused")
    if not refused:
        raise Mismatch(f"none of {len(asks)} requests was refused where at most {_RUNNING + SMALL_QUEUE} fit")
    if len(taken) < SMALL_QUEUE:
        raise Mismatch(f"only {len(taken)} of {len(asks)} requests were taken where {SMALL_QUEUE} may wait")
    for one in refused:
        _must_be_queue_full(one)
    metrics = wait_idle(small_server, "after a full queue")
    if metrics["vllm:admission_rejections_total"] < len(refused):
        raise Mismatch(
            f"/metrics counts {metrics['vllm:admission_rejections_total']:.0f} rejections, there were {len(refused)}"
        )
    again = asks[:4]
    answers(again, stream_all(small_server, again), "after the queue was full")


def _must_be_queue_full(one: Heard) -> None:
    error = parse(ErrorBody, one.error, "429").error
    if error.code != "queue_full":
        raise Mismatch(f"code of a 429 is {error.code!r}, expected 'queue_full'")
    if one.retry_after is None or not one.retry_after.isdigit():
        raise Mismatch(f"Retry-After of a 429 is {one.retry_after!r}, expected a number of seconds")


@check("L4/overload/never-fits")
def test_a_request_that_can_never_fit(small_server: Server) -> None:
    """A prompt longer than the whole pool is refused at once with what would fit; it does not wait for ever."""
    limit = small_server.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"model": MODEL_NAME, "prompt": [5] * (limit + 1), "max_tokens": 1}
    reply = small_server.post("/v1/completions", body)
    if reply.status_code != 400:
        raise Mismatch(f"a prompt of {limit + 1} tokens gets status {reply.status_code}, max_model_len is {limit}")
    if (code := parse(ErrorBody, reply.content, "400").error.code) != "context_length_exceeded":
        raise Mismatch(f"a prompt of {limit + 1} tokens gets code {code!r}, expected 'context_length_exceeded'")
    fits = {"model": MODEL_NAME, "prompt": [5] * (limit - 1), "max_tokens": 1}
    if (status := small_server.post("/v1/completions", fits).status_code) != 200:
        raise Mismatch(f"a prompt of {limit - 1} tokens gets status {status}, max_model_len is {limit}")


@check("L4/overload/burst-of-leavers")
def test_clients_that_all_leave_an_overloaded_server(small_server: Server, findings: Findings) -> None:
    """Sixteen clients fill the server and go away, running or queued: it is idle again and right again."""
    dice = random.Random(16)
    asks = [
        Ask(prompt=copy_prompt(180, seed=600 + index), max_tokens=75, leave_after_s=0.05 + dice.random() * 0.2)
        for index in range(_RUNNING + SMALL_QUEUE)
    ]
    heard = stream_all(small_server, asks)
    findings.notes["left"] = sum(one.left for one in heard)
    wait_idle(small_server, "after all clients of an overloaded server left")
    good = _asks(4, seed=700)
    answers(good, stream_all(small_server, good), "after all clients had left")


@check("L4/life/loading")
def test_a_server_that_loads_says_so(small_server: Server, findings: Findings) -> None:
    """Until the model is loaded, /health says 503 `loading`, and nothing else."""
    findings.notes |= {"seconds_to_healthy": round(small_server.start_s, 2)}
    for status, body in small_server.start_answers:
        error = parse(ErrorBody, json.dumps(body), "/health of a loading server").error
        if (status, error.code) != (503, "loading"):
            raise Mismatch(f"/health of a loading server says {status} {error.code!r}, expected 503 'loading'")


@check("L4/life/drain")
def test_sigterm_lets_running_streams_finish(small_server: Server, servers: Servers, findings: Findings) -> None:
    """At SIGTERM running streams come to their right end, the exit code is 0, and no process is left."""
    asks = _asks(2, seed=800, length=60)
    heard: list[Heard] = []
    clients = threading.Thread(target=lambda: heard.extend(stream_all(small_server, asks)))
    clients.start()
    family = small_server.family()
    while small_server.get("/load").json()["server_load"] < len(asks) and clients.is_alive():
        time.sleep(0.005)
    small_server.process.send_signal(signal.SIGTERM)
    clients.join()
    code = servers.stop()
    findings.notes |= {"processes": len(family), "exit_code": code}
    answers(asks, heard, "streams of a server that got SIGTERM")
    if code != 0:
        raise Mismatch(f"the server ended with exit code {code} after SIGTERM: {small_server.log_end()}")
    left = [process.pid for process in family if process.is_running()]
    if left:
        raise Mismatch(f"processes {left} of the server are left after it ended")

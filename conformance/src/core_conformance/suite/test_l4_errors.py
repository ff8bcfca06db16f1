"""L4: what is wrong with a request is said with status, code and field, in one shape, and harms nobody else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from core_conformance.checks import check
from core_conformance.records import Findings
from core_conformance.served.copying import copy_answer, copy_prompt
from core_conformance.served.server import MODEL_NAME, Server
from core_conformance.served.wire import ErrorBody, parse
from core_conformance.subject import Mismatch

_TEXT, _CHAT = "/v1/completions", "/v1/chat/completions"
_PROMPT = copy_prompt(45, seed=3)
_HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@dataclass(frozen=True)
class Wrong:
    """A request that must be refused.

    Args:
        path: Route.
        body: Fields over a good request; bytes are sent as they are, None means a GET.
        status: What it must be answered with.
        param: The field that must be named.
        code: The code, where it is fixed.
    """

    path: str
    body: Any
    status: int = 400
    param: str | None = None
    code: str | None = None


_FIELDS: dict[str, tuple[str, Any]] = {
    "temperature": ("temperature", -0.5),
    "top_p": ("top_p", 0),
    "top_k": ("top_k", -7),
    "min_p": ("min_p", 1.5),
    "n": ("n", 0),
    "max_tokens": ("max_tokens", -1),
    "presence_penalty": ("presence_penalty", 2.5),
    "frequency_penalty": ("frequency_penalty", "much"),
    "repetition_penalty": ("repetition_penalty", 0),
    "logit_bias": ("logit_bias", {"five": 1.0}),
    "stop": ("stop", [""]),
    "seed": ("seed", "x"),
    "stop_token_ids": ("stop_token_ids", ["a"]),
    "stream_options": ("stream_options", {"include_usage": True}),
    "priority": ("priority", 3),
}
_WRONG = {
    "json": Wrong(_TEXT, b'{"prompt": ', code="invalid_json"),
    "no-object": Wrong(_TEXT, b"[1, 2]"),
    "no-prompt": Wrong(_TEXT, b"{}", param="prompt"),
    "empty-prompt-list": Wrong(_TEXT, {"prompt": []}, param="prompt"),
    "prompt-type": Wrong(_TEXT, {"prompt": {"a": 1}}, param="prompt"),
    "prompt-id-too-large": Wrong(_TEXT, {"prompt": [1, 10**6]}, param="prompt"),
    "prompt-id-negative": Wrong(_TEXT, {"prompt": [1, -1]}, param="prompt"),
    "prompt-too-long": Wrong(_TEXT, {"prompt": [5] * 9000}, param="prompt", code="context_length_exceeded"),
    "no-messages": Wrong(_CHAT, b"{}", param="messages"),
    "empty-messages": Wrong(_CHAT, {"messages": []}, param="messages"),
    "message-without-role": Wrong(_CHAT, {"messages": [{"content": "x"}]}),
    "too-many-logprobs": Wrong(_TEXT, {"prompt": _PROMPT, "logprobs": 1000}, param="logprobs"),
    "too-many-top-logprobs": Wrong(_CHAT, {**_HELLO, "logprobs": True, "top_logprobs": 1000}, param="top_logprobs"),
    "unknown-model": Wrong(_TEXT, {"prompt": _PROMPT, "model": "nosuch"}, 404, "model", "model_not_found"),
    "unknown-model-chat": Wrong(_CHAT, {**_HELLO, "model": "nosuch"}, 404, "model", "model_not_found"),
    "unknown-model-get": Wrong("/v1/models/nosuch", None, 404, "model", "model_not_found"),
    "unknown-route": Wrong("/v1/nosuch", {"a": 1}, 404, code="not_found"),
    "method": Wrong(_TEXT, None, 405, code="method_not_allowed"),
    "unavailable-field": Wrong(_TEXT, {"prompt": _PROMPT, "suffix": "x"}, param="suffix", code="unsupported_field"),
    "detokenize-id": Wrong("/detokenize", {"tokens": [10**6]}, param="tokens"),
}


def _refused(server: Server, wrong: Wrong, what: str) -> None:
    if wrong.body is None:
        reply = server.get(wrong.path)
    else:
        reply = server.post(wrong.path, wrong.body if isinstance(wrong.body, bytes) else _whole(wrong.body))
    if reply.status_code != wrong.status:
        raise Mismatch(f"{what}: status {reply.status_code}, expected {wrong.status}: {reply.text[:200]}")
    kind = reply.headers.get("content-type", "")
    if not kind.startswith("application/json"):
        raise Mismatch(f"{what}: content-type is {kind!r}, not application/json")
    error = parse(ErrorBody, reply.content, what).error
    if wrong.param is not None and (error.param or "").partition(".")[0] != wrong.param:  # `stop.0` is of `stop`
        raise Mismatch(f"{what}: param is {error.param!r}, expected {wrong.param!r}: {error.message}")
    if wrong.code is not None and error.code != wrong.code:
        raise Mismatch(f"{what}: code is {error.code!r}, expected {wrong.code!r}: {error.message}")


def _whole(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL_NAME, **body}


@check("L4/errors/request", _WRONG)
def test_a_wrong_request_is_refused(server: Server, variant: Wrong) -> None:
    """Status, code and field of a request that is wrong as a whole."""
    _refused(server, variant, f"{variant.path} with {json.dumps(str(variant.body))[:60]}")


@check("L4/errors/fields", ["completions", "chat"])
def test_a_field_out_of_range_is_named(server: Server, findings: Findings, variant: str) -> None:
    """Each sampling field with a value that no request may have: 400, and `param` is the field."""
    path, good = (_TEXT, {"prompt": _PROMPT}) if variant == "completions" else (_CHAT, _HELLO)
    for field, value in _FIELDS.values():
        _refused(server, Wrong(path, {**good, field: value}, param=field), f"{field}={value!r} at {path}")
    findings.notes["fields"] = len(_FIELDS)


@check("L4/errors/in-a-stream")
def test_an_error_before_the_first_token_has_its_status(server: Server) -> None:
    """A streamed request that is wrong gets the same error as one that is not streamed, not a stream."""
    for body in ({"prompt": [5] * 9000, "stream": True}, {"prompt": _PROMPT, "top_p": 7, "stream": True}):
        _refused(server, Wrong(_TEXT, body), "a streamed request that is wrong")


@check("L4/errors/too-large")
def test_a_body_that_is_too_large(server: Server) -> None:
    """33 MiB get 413 and the server goes on."""
    reply = server.post(_TEXT, b'{"prompt": "' + b"x" * (33 << 20) + b'"}')
    if reply.status_code != 413:
        raise Mismatch(f"a body of 33 MiB gets status {reply.status_code}, expected 413")
    if (code := parse(ErrorBody, reply.content, "413").error.code) != "request_too_large":
        raise Mismatch(f"a body of 33 MiB gets code {code!r}, expected 'request_too_large'")


@check("L4/errors/harmless")
def test_wrong_requests_leave_the_server_as_it_was(server: Server) -> None:
    """After many refusals a good request gets its right answer, and nothing is counted as running."""
    for _ in range(5):
        for body in ({"prompt": [5] * 9000}, {"prompt": _PROMPT, "n": 0}, {"prompt": [1, -1]}):
            server.post(_TEXT, _whole(body))
    reply = server.post(_TEXT, _whole({"prompt": _PROMPT, "max_tokens": 9, "temperature": 0}))
    if reply.json()["choices"][0]["text"] != copy_answer(_PROMPT, 9):
        raise Mismatch(f"after refused requests a good one gets {reply.json()['choices'][0]['text']!r}")
    load = server.get("/load").json()["server_load"]
    if load:
        raise Mismatch(f"/load counts {load} requests when all have ended")

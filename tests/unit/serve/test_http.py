"""Keys, errors, sizes, request ids and the small routes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from core.errors import QueueFullError
from core.serve.app import DEV_ROUTES, ROUTES

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"model": "m", "prompt": "hi", "max_tokens": 2}


def check_error(reply: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert reply.status_code == status
    assert len(reply.content) < 65536
    body = reply.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert len(error["message"]) > 10
    assert isinstance(error["type"], str)
    if code is not None:
        assert error["code"] == code
    return dict(error)


GUARDED = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/invocations",
    "/reset_prefix_cache",
    "//v1/chat/completions",
    "/V1/chat/completions",
    "/v1/chat/completions/",
    "/health/../v1/completions",
    "/health/",
    "/metrics/../v1/chat/completions",
]


@pytest.mark.parametrize("path", GUARDED)
async def test_no_key_no_work(connect: Any, engine: FakeEngine, path: str) -> None:
    """H049: every route that does work, known or not, however it is spelled."""
    async with connect(engine, api_keys=("K",), dev_routes=True) as client:
        for headers in ({}, {"Authorization": "Bearer k"}, {"Authorization": "K"}, {"x-api-key": "KK"}):
            reply = await client.post(
                httpx.URL("http://test").copy_with(raw_path=path.encode()), json=CHAT, headers=headers
            )
            assert reply.status_code == 401
            check_error(reply, 401, "invalid_api_key")
    assert engine.seen == []


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/metrics"])
async def test_open_paths_need_no_key(connect: Any, engine: FakeEngine, path: str) -> None:
    async with connect(engine, api_keys=("K",)) as client:
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "Bearer K"}, {"authorization": "bearer K"}, {"x-api-key": "K"}, {"Authorization": "Bearer L"}],
)
async def test_a_known_key_opens(connect: Any, engine: FakeEngine, headers: dict[str, str]) -> None:
    async with connect(engine, api_keys=("K", "L")) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        check_error(await client.post("/v1/embeddings", json=CHAT, headers=headers), 404)


async def test_every_work_route_is_outside_the_open_list(connect: Any, engine: FakeEngine) -> None:
    """A route added later is guarded unless someone opens it on purpose."""
    async with connect(engine, api_keys=("K",), dev_routes=True) as client:
        for method, path, _, _ in (*ROUTES, *DEV_ROUTES):
            reply = await client.request(method, path.replace("{name:path}", "m"))
            open_path = path in ("/health", "/ping", "/version", "/load", "/metrics")
            assert reply.status_code == (200 if open_path else 401), path


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    """H050."""
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/tokenize", TEXT)):
        error = check_error(await client.post(path, json={**body, "model": "no-such"}), 404, "model_not_found")
        assert error["param"] == "model"
        assert "'m'" in error["message"]


@pytest.mark.parametrize("raw", [b'{"model": ', b"", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"null"])
async def test_broken_bodies(client: httpx.AsyncClient, raw: bytes) -> None:
    """H050."""
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        check_error(await client.post(path, content=raw, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [{"a": "b" * 20}] * 3000},
        {"prompt": ["x", 5] * 1500},
        {"prompt": ["x"] * 2000},
        {"prompt": "hi", "stop": [5] * 3000},
        {"prompt": "hi", "allowed_token_ids": ["x" * 100] * 3000},
        {"prompt": "hi", "logit_bias": {f"k{i}": "v" for i in range(3000)}},
        {"prompt": "hi", "seed": "s" * 100_000},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [True]},
        {},
    ],
)
async def test_wrong_types_give_a_short_400(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """H050: thousands of wrong items are answered with one of them."""
    check_error(await client.post("/v1/completions", json={"model": "m", **body}), 400)


async def test_a_long_model_name_is_not_echoed_in_full(client: httpx.AsyncClient) -> None:
    check_error(await client.post("/v1/completions", json={**TEXT, "model": "x" * 500_000}), 404, "model_not_found")


async def test_body_limit(connect: Any, engine: FakeEngine) -> None:
    """H050: announced and chunked bodies above the limit."""
    async with connect(engine, max_body_bytes=2000) as client:
        large = json.dumps({**TEXT, "prompt": "x" * 3000}).encode()
        check_error(await client.post("/v1/completions", content=large), 413, "request_too_large")

        async def chunks() -> Any:
            for start in range(0, len(large), 500):
                yield large[start : start + 500]

        check_error(await client.post("/v1/completions", content=chunks()), 413, "request_too_large")
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200


async def test_unknown_routes_and_methods(client: httpx.AsyncClient) -> None:
    check_error(await client.get("/nope"), 404, "not_found")
    check_error(await client.get("/v1/completions"), 405, "method_not_allowed")
    check_error(await client.post("/v1/chat/completions/", json=CHAT), 404, "not_found")
    check_error(await client.post("/reset_prefix_cache"), 404)


async def test_any_content_type_is_read_as_json(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    reply = await client.post("/v1/completions", content=json.dumps(TEXT), headers=headers)
    assert reply.status_code == 200


async def test_full_queue(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.error = QueueFullError("8 requests wait already", retry_after_s=7)
    for stream in (False, True):
        reply = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        check_error(reply, 429, "queue_full")
        assert reply.headers["retry-after"] == "7"
    assert 'reason="queue_full"} 2.0' in (await client.get("/metrics")).text


@pytest.mark.parametrize("state", ["restarting", "dead"])
async def test_health_says_what_is_wrong(client: httpx.AsyncClient, engine: FakeEngine, state: str) -> None:
    engine.state, engine.reason = state, "it ran out of memory"
    for path in ("/health", "/ping"):
        error = check_error(await client.get(path), 503, f"engine_{state}")
        assert state in error["message"]
        assert "out of memory" in error["message"]
    check_error(await client.post("/v1/completions", json=TEXT), 503)


async def test_a_server_without_an_engine_is_loading(connect: Any) -> None:
    async with connect(None) as client:
        check_error(await client.get("/health"), 503, "loading")
        check_error(await client.post("/v1/chat/completions", json=CHAT), 503, "loading")
        check_error(await client.post("/tokenize", json=TEXT), 503, "loading")
        check_error(await client.get("/v1/models"), 503, "loading")
        assert (await client.get("/metrics")).status_code == 200


async def test_a_draining_server_takes_nothing(client: httpx.AsyncClient) -> None:
    client.state.draining = True  # type: ignore[attr-defined]
    check_error(await client.post("/v1/chat/completions", json=CHAT), 503, "shutting_down")
    check_error(await client.get("/health"), 503, "shutting_down")


async def test_an_unexpected_error_reveals_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret detail")

    engine.reply = broken
    for stream in (False, True):
        error = check_error(await client.post("/v1/completions", json={**TEXT, "stream": stream}), 500)
        assert "secret" not in error["message"]


async def test_request_ids_are_labels(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """H036: the caller's id is returned, and shared ids do not collide."""
    replies = [
        await client.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "id"}),
        await client.post("/v1/completions", json=TEXT, headers={"X-Request-Id": "id"}),
    ]
    for reply in replies:
        assert reply.status_code == 200
        assert reply.headers["x-request-id"] == "id"
        assert reply.json()["id"] == "cmpl-id"
    assert len({request.key for request in engine.seen}) == 2
    assert {request.choices[0].external_id for request in engine.seen} == {"id"}


@pytest.mark.parametrize("value", ["x" * 1_000_000, "x" * 257])
async def test_long_request_ids_are_refused(client: httpx.AsyncClient, value: str) -> None:
    """H036."""
    reply = await client.post("/v1/completions", json=TEXT, headers={"X-Request-Id": value})
    check_error(reply, 400, "invalid_request_id")
    reply = await client.post("/v1/completions", json={**TEXT, "request_id": value})
    check_error(reply, 400, "invalid_request_id")


async def test_models(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    (model,) = body["data"]
    assert model["id"] == "m"
    assert model["root"] == "models/m"
    assert model["max_model_len"] == 512
    assert (await client.get("/v1/models/m")).json() == model
    check_error(await client.get("/v1/models/other/name"), 404, "model_not_found")


async def test_several_served_names(connect: Any, engine: FakeEngine) -> None:
    async with connect(engine, served_model_names=("a", "org/b")) as client:
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["a", "org/b"]
        assert (await client.get("/v1/models/org/b")).status_code == 200
        for name in ("a", "org/b"):
            reply = await client.post("/v1/completions", json={**TEXT, "model": name})
            assert reply.json()["model"] == name


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert body == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [256, *"hé".encode()],
        "token_strs": ["<bos>", "h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    reply = await client.post("/detokenize", json={"tokens": body["tokens"]})
    assert reply.json() == {"prompt": "<bos>hé"}
    bare = (await client.post("/tokenize", json={"prompt": "h", "add_special_tokens": False})).json()
    assert bare["tokens"] == [104]


@pytest.mark.parametrize("body", [{"tokens": [-1]}, {"tokens": [1000]}, {"tokens": ["x"]}, {}])
async def test_detokenize_checks_ids(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    check_error(await client.post("/detokenize", json=body), 400)


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, {"messages": []}]
)
async def test_tokenize_needs_one_source(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    check_error(await client.post("/tokenize", json=body), 400)


async def test_small_routes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "healthy"}
    assert (await client.get("/load")).json() == {"server_load": 0}
    assert isinstance((await client.get("/version")).json()["version"], str)
    schema = (await client.get("/openapi.json")).json()
    assert "requestBody" in schema["paths"]["/v1/chat/completions"]["post"]


async def test_dev_routes_are_there_only_on_demand(connect: Any, engine: FakeEngine) -> None:
    async with connect(engine, dev_routes=True) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 10**19}, "top_k"),
        ({"priority": 10**19}, "priority"),
        ({"priority": -(10**30)}, "priority"),
        ({"seed": 10**30}, "seed"),
        ({"stop": ["x" * 4097]}, "stop.0"),
    ],
)
async def test_values_that_no_engine_can_take_are_the_callers_mistake(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        assert check_error(await client.post(path, json={**body, **fields}), 400)["param"] == param

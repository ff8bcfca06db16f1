"""POST /v1/completions against a scripted engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import EOS, FakeEngine, says

from core.errors import EngineDeadError

PATH = "/v1/completions"


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post(PATH, json={"model": "m", "prompt": "hi", **body})


async def test_answers_in_the_legacy_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = says("Hello")
    reply = await post(client, max_tokens=10)
    body = reply.json()
    assert reply.status_code == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "m"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_max_tokens_is_16_where_not_given(client: httpx.AsyncClient) -> None:
    body = (await post(client)).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hi", 1),
        (["hi", "you"], 2),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
    ],
)
async def test_takes_every_form_of_prompt(client: httpx.AsyncClient, prompt: Any, texts: int) -> None:
    body = (await post(client, prompt=prompt, max_tokens=2, n=2)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * texts))
    assert [choice["text"] for choice in body["choices"]] == ["aa", "bb"] * texts
    assert body["usage"]["completion_tokens"] == 4 * texts


async def test_stream_says_the_same_as_the_whole(client: httpx.AsyncClient, engine: FakeEngine, events: Any) -> None:
    engine.reply = says("Hello")
    whole = (await post(client, max_tokens=10)).json()
    reply = await post(client, max_tokens=10, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(reply)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


async def test_every_choice_finishes_once_and_the_request_counts_once(client: httpx.AsyncClient, events: Any) -> None:
    """H008: n=3 in a stream."""
    body = {"prompt": [1, 2, 3, 4, 5], "n": 3, "max_tokens": 4, "ignore_eos": True, "seed": 1, "temperature": 1.0}
    reply = await post(client, **body, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(reply)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 5
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["usage"]["total_tokens"] == 17
    finishes = [(c["index"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [(0, "length"), (1, "length"), (2, "length")]
    metrics = (await client.get("/metrics")).text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0' in metrics
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 0.0' in metrics
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 12.0' in metrics
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 5.0' in metrics


async def test_legacy_map_lists_every_candidate(client: httpx.AsyncClient) -> None:
    """H009: three byte fragments decode to the same replacement character and stay three entries."""
    body = (await post(client, max_tokens=1, logprobs=5)).json()
    top = body["choices"][0]["logprobs"]["top_logprobs"][0]
    assert len(top) == 5
    assert list(top)[:2] == ["a", "b"]
    assert set(list(top)[2:]) == {"bytes:\\xf0", "bytes:\\x9f", "bytes:\\xe2\\x82"}
    assert list(top.values()) == sorted(top.values(), reverse=True)


async def test_a_sampled_token_outside_the_top_is_listed_too(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.candidates = (98, 99)
    logprobs = (await post(client, max_tokens=1, logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"b": -0.5, "c": -1.0, "a": -9.0}]
    assert logprobs["token_logprobs"] == [-9.0]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_covers_prompt_and_output(
    client: httpx.AsyncClient, events: Any, stream: bool
) -> None:
    """H010 a: 9 prompt tokens and 8 output tokens give 17 entries."""
    body = {"prompt": "12345678", "max_tokens": 8, "ignore_eos": True, "echo": True, "logprobs": 1, "stream": stream}
    reply = await post(client, **body)
    assert reply.status_code == 200
    choices = [c for chunk in events(reply)[:-1] for c in chunk["choices"]] if stream else reply.json()["choices"]
    merged: dict[str, list[Any]] = {}
    for choice in choices:
        for key, values in choice["logprobs"].items():
            merged.setdefault(key, []).extend(values)
    assert {key: len(values) for key, values in merged.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 17
    )
    assert merged["token_logprobs"][0] is None
    assert merged["top_logprobs"][0] is None
    assert merged["text_offset"][0] == 0
    assert merged["text_offset"] == sorted(merged["text_offset"])
    assert merged["text_offset"][-1] == 15
    assert "".join(c["text"] for c in choices) == "12345678aaaaaaaa"


async def test_prompt_logprobs_hold_every_prompt_token(client: httpx.AsyncClient) -> None:
    """H010 b."""
    body = (await post(client, prompt="12345678", max_tokens=1, prompt_logprobs=1)).json()
    entries = body["choices"][0]["prompt_logprobs"]
    assert len(entries) == 9
    assert entries[0] is None
    for token_id, entry in zip(b"12345678", entries[1:], strict=True):
        assert entry[str(token_id)]["decoded_token"] == chr(token_id)
        assert entry["97"] == {"logprob": -0.5, "rank": 1, "decoded_token": "a"}


async def test_scoring_generates_nothing(client: httpx.AsyncClient) -> None:
    """H011: echo, logprobs and max_tokens=0; the server goes on."""
    prompt = "Your answer: Yes"
    body = (await post(client, prompt=prompt, max_tokens=0, echo=True, logprobs=1)).json()
    choice = body["choices"][0]
    assert choice["text"] == prompt
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert (await post(client)).status_code == 200


async def test_echo_of_ids_is_their_text(client: httpx.AsyncClient) -> None:
    body = (await post(client, prompt=[256, 104, 105], max_tokens=2, echo=True)).json()
    assert body["choices"][0]["text"] == "hiaa"


async def test_window_is_checked_and_the_server_goes_on(connect: Any) -> None:
    """H012: one token over the window, room for a few, and no room at all."""
    engine = FakeEngine(max_model_len=64)
    async with connect(engine) as client:
        statuses, replies = [], []
        for length, max_tokens in ((65, 1), (8, 4), (60, 10), (60, None), (64, 1)):
            reply = await post(client, prompt=[65] * length, max_tokens=max_tokens, ignore_eos=True)
            statuses.append(reply.status_code)
            replies.append(reply.json())
    assert statuses == [400, 200, 400, 200, 400]
    for index in (0, 2, 4):
        assert replies[index]["error"]["code"] == "context_length_exceeded"
        assert "64" in replies[index]["error"]["message"]
    assert replies[0]["error"]["param"] == "prompt"
    assert replies[3]["usage"]["completion_tokens"] == 4
    assert replies[3]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [5, 1000]}, "prompt"),
        ({"logit_bias": {"1000": 5}}, "logit_bias"),
        ({"logit_bias": {"x": 5}}, "logit_bias"),
        ({"stop_token_ids": [1000], "min_tokens": 1}, "stop_token_ids"),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids"),
        ({"logprobs": 2_000_000_000}, "logprobs"),
        ({"logprobs": 2_000_000_000, "echo": True}, "logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_ids_and_counts_out_of_range_are_refused(
    client: httpx.AsyncClient, body: dict[str, Any], param: str, stream: bool
) -> None:
    """H013: 400 that names the field, also for a stream, and an ordinary request works after it."""
    reply = await post(client, **body, stream=stream)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert (await post(client)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", True), ("max_tokens", "5"), ("temperature", "0.5"), ("n", True), ("stream", "yes"), ("echo", 1)],
)
async def test_a_value_of_another_json_type_is_refused(client: httpx.AsyncClient, field: str, value: Any) -> None:
    reply = await post(client, **{field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


async def test_a_whole_number_counts_as_a_float(client: httpx.AsyncClient) -> None:
    assert (await post(client, temperature=1, top_p=1, logit_bias={"5": 1})).status_code == 200


async def test_usage_chunk_is_last_and_only_where_asked(
    client: httpx.AsyncClient, engine: FakeEngine, events: Any
) -> None:
    """H051 a, d: one usage chunk with empty choices; cached tokens are reported."""
    engine.cached_tokens = 2
    *chunks, usage, done = events(await post(client, stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert usage["choices"] == []
    counts = usage["usage"]
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"] == 19
    assert counts["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)


async def test_continuous_usage_grows(client: httpx.AsyncClient, events: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, usage, _ = events(await post(client, stream=True, max_tokens=3, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert usage["usage"]["completion_tokens"] == 3


async def test_stream_options_without_stream_are_refused(client: httpx.AsyncClient) -> None:
    """H051 c."""
    reply = await post(client, stream_options={"include_usage": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "stream_options"


async def test_an_error_before_the_first_token_has_its_status(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fails_after = 0
    for stream in (False, True):
        reply = await post(client, stream=stream)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_dead"
        assert "retry-after" in reply.headers


async def test_an_error_in_the_middle_is_an_event(client: httpx.AsyncClient, engine: FakeEngine, events: Any) -> None:
    engine.fails_after = 2
    engine.error = EngineDeadError("the engine died")
    reply = await post(client, stream=True)
    assert reply.status_code == 200
    *chunks, last = events(reply)
    assert len(chunks) == 2
    assert last["error"]["message"] == "the engine died"
    assert "[DONE]" not in reply.text


async def test_return_token_ids(client: httpx.AsyncClient, engine: FakeEngine, events: Any) -> None:
    engine.reply = says("A")
    choice = (await post(client, return_token_ids=True)).json()["choices"][0]
    assert choice["prompt_token_ids"] == [256, *b"hi"]
    assert choice["token_ids"] == [65, EOS]
    chunks = events(await post(client, return_token_ids=True, stream=True))[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [256, *b"hi"]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[65], [EOS]]


async def test_one_bos_with_and_without_special_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """H020 raw: one BOS that the tokenizer adds, or one that the text spells."""
    await post(client, prompt="hi")
    await post(client, prompt="<bos>hi", add_special_tokens=False)
    assert [request.prompt_token_ids for request in engine.seen] == [[256, *b"hi"]] * 2


async def test_every_field_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 9,
        "stop": "x",
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 4,
        "skip_special_tokens": False,
        "allowed_token_ids": [97, 98],
        "bad_words": ["zz"],
        "logit_bias": {"97": 1.5},
        "cache_salt": "s",
    }
    assert (await post(client, **body)).status_code == 200
    request = engine.seen[0]
    params = request.params
    tuples = {"stop": ("x",), "stop_token_ids": (5,), "allowed_token_ids": (97, 98), "bad_words": ("zz",)}
    expected = {**body, **tuples, "logit_bias": {97: 1.5}}
    expected.pop("cache_salt")
    assert {name: getattr(params, name) for name in expected} == expected
    assert request.choices[0].cache_salt == "s"


@pytest.mark.parametrize(
    "body",
    [
        {"best_of": 3},
        {"suffix": "x"},
        {"use_beam_search": True},
        {"structured_outputs": {"json": {}}},
        {"guided_json": {"type": "object"}},
        {"truncate_prompt_tokens": 5},
        {"response_format": {"type": "json_object"}},
        {"priority": 1},
        {"cache_salt": ""},
        {"stop": ["a"] * 17},
        {"stop": ""},
        {"prompt_logprobs": 1, "stream": True},
    ],
)
async def test_what_cannot_be_honoured_is_refused(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    reply = await post(client, **body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == next(iter(body))
    assert error["message"]


async def test_priority_passes_where_the_policy_is_priority(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    client.state.scheduling_policy = "priority"  # type: ignore[attr-defined]
    assert (await post(client, priority=-3)).status_code == 200
    assert engine.seen[0].choices[0].priority == -3

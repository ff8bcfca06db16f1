"""L4: the small routes: models, tokenization, health, version, load, metrics."""

from __future__ import annotations

from core_conformance.checks import check
from core_conformance.engines.models import NUM_TOKENS
from core_conformance.served.copying import copy_prompt, ids_of
from core_conformance.served.server import MODEL_NAME, Server
from core_conformance.served.wire import Model, ModelList, Tokenized, parse
from core_conformance.subject import Mismatch

_COUNT = 12
_PROMPT = copy_prompt(61, seed=1)
_BODY = {"model": MODEL_NAME, "prompt": _PROMPT, "max_tokens": _COUNT, "temperature": 0, "ignore_eos": True}


def _must_be(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise Mismatch(f"{what} is {got!r}, expected {expected!r}")


@check("L4/wire/models")
def test_models(server: Server) -> None:
    """The list of names, and each of them by itself."""
    listed = parse(ModelList, server.get("/v1/models").content, "GET /v1/models")
    _must_be("names of GET /v1/models", [model.id for model in listed.data], [MODEL_NAME])
    one = parse(Model, server.get(f"/v1/models/{MODEL_NAME}").content, "GET /v1/models/NAME")
    _must_be("GET /v1/models/NAME", one, listed.data[0])


@check("L4/wire/tokenize")
def test_tokenize_and_back(server: Server) -> None:
    """Ids of a text and of a conversation are those of the tokenizer, and give the text again."""
    raw = server.post("/tokenize", {"model": MODEL_NAME, "prompt": _PROMPT, "return_token_strs": True})
    plain = parse(Tokenized, raw.content, "POST /tokenize")
    _must_be("ids of a prompt", (plain.count, tuple(plain.tokens)), (len(_PROMPT), ids_of(_PROMPT)))
    _must_be("token_strs", "".join(plain.token_strs or ()), _PROMPT)
    messages = [{"role": "user", "content": _PROMPT}]
    chat = parse(Tokenized, server.post("/tokenize", {"model": MODEL_NAME, "messages": messages}).content, "chat")
    _must_be("ids of a conversation", chat.tokens, plain.tokens)
    back = server.post("/detokenize", {"model": MODEL_NAME, "tokens": plain.tokens}).json()
    _must_be("POST /detokenize", back, {"prompt": _PROMPT})
    assert plain.max_model_len > 100 and max(plain.tokens) < NUM_TOKENS


@check("L4/wire/small-routes")
def test_small_routes(server: Server) -> None:
    """/health, /ping, /version and /load answer in their shape; a caller's X-Request-Id comes back."""
    for path, expected in (("/health", {"status": "healthy"}), ("/ping", {"status": "healthy"})):
        _must_be(f"GET {path}", server.get(path).json(), expected)
    version = server.get("/version").json()
    assert [*version] == ["version"] and version["version"], f"GET /version is {version}"
    _must_be("GET /load", server.get("/load").json(), {"server_load": 0})
    reply = server.post("/v1/completions", _BODY, **{"X-Request-Id": "mine-1"})
    _must_be("X-Request-Id of the answer", reply.headers.get("x-request-id"), "mine-1")
    assert "mine-1" in reply.json()["id"], f"the id of the answer is {reply.json()['id']!r}, X-Request-Id was mine-1"
    schema = server.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models"} <= schema["paths"].keys()


_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total")
_HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")


@check("L4/wire/metrics")
def test_metrics_count_what_was_served(server: Server) -> None:
    """The exposition has vLLM's names, its labels name the model, and a request moves the counters by what it was."""
    before = server.metrics()
    names = [f"vllm:{name}" for name in (*_GAUGES, *_COUNTERS, *(f"{name}_count" for name in _HISTOGRAMS))]
    missing = [name for name in names if name not in before]
    assert not missing, f"/metrics lacks {missing}"
    _must_be("label model_name", server.metric_labels("vllm:num_requests_running").get("model_name"), MODEL_NAME)
    server.post("/v1/completions", _BODY)
    after = server.metrics()
    moved = {name: after[name] - before[name] for name in names}
    _must_be("prompt_tokens_total moved by", moved["vllm:prompt_tokens_total"], len(_PROMPT))
    _must_be("generation_tokens_total moved by", moved["vllm:generation_tokens_total"], _COUNT)
    _must_be("request_success_total moved by", moved["vllm:request_success_total"], 1)
    _must_be("observed first tokens", moved["vllm:time_to_first_token_seconds_count"], 1)
    _must_be("observed gaps", moved["vllm:inter_token_latency_seconds_count"] > 0, True)

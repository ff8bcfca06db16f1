"""The small routes: models, tokenization, health, version, load, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from core.errors import InvalidRequestError
from core.serve.errors import ApiError, error_response
from core.serve.interface import ServedTokenizer
from core.serve.logprobs import TokenTexts
from core.serve.metrics import CONTENT_TYPE
from core.serve.prompts import encode_text
from core.serve.protocol import ChatPromptFields, DetokenizeRequest, TokenizeRequest, read_body
from core.serve.state import ServerState, server_state
from core.serve.version import product_version

__all__ = [
    "detokenize",
    "get_model",
    "health",
    "list_models",
    "load",
    "metrics",
    "reset_prefix_cache",
    "tokenize",
    "version",
]


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def health(request: Request) -> Response:
    """200 where requests are taken; else 503 with the reason."""
    problem = server_state(request).problem()
    return _json({"status": "healthy"}) if problem is None else error_response(problem)


async def version(request: Request) -> Response:
    """The server's version."""
    return _json({"version": product_version()})


async def load(request: Request) -> Response:
    """Requests that are being answered now."""
    return _json({"server_load": server_state(request).num_requests})


async def metrics(request: Request) -> Response:
    """The Prometheus exposition."""
    return Response(server_state(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _model(state: ServerState, name: str) -> dict[str, Any]:
    facts = state.engine.facts
    return {
        "id": name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "core",
        "root": state.model,
        "parent": None,
        "max_model_len": facts.max_model_len,
    }


async def list_models(request: Request) -> Response:
    """The names that requests may use."""
    state = server_state(request)
    return _json({"object": "list", "data": [_model(state, name) for name in state.names]})


async def get_model(request: Request) -> Response:
    """One of the names; 404 where it is not served."""
    state = server_state(request)
    name = request.path_params["name"]
    state.check_model(name)
    return _json(_model(state, name))


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of a conversation as chat completions would see it."""
    state = server_state(request)
    body = await read_body(request, TokenizeRequest)
    state.check_model(body.model)
    engine = state.engine
    if body.prompt is not None:
        add = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await encode_text(engine, body.prompt, add)
    else:
        ids = await state.renderer.render(_chat(body))
    shown: dict[str, Any] = {"count": len(ids), "max_model_len": engine.facts.max_model_len, "tokens": ids}
    if body.return_token_strs:
        texts = TokenTexts(engine.tokenizer)
        shown["token_strs"] = await asyncio.to_thread(lambda: [texts.text(i) for i in ids])
    return _json(shown)


def _chat(body: TokenizeRequest) -> ChatPromptFields:
    if not body.messages:
        raise ApiError(400, "messages must hold at least one message", param="messages")
    return ChatPromptFields(
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )


async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    state = server_state(request)
    body = await read_body(request, DetokenizeRequest)
    state.check_model(body.model)
    return _json({"prompt": await asyncio.to_thread(_decode, state.engine.tokenizer, body.tokens)})


def _decode(tokenizer: ServedTokenizer, tokens: list[int]) -> str:
    for token_id in tokens:
        if not 0 <= token_id < tokenizer.vocab_size:
            message = f"tokens holds id {token_id}; ids must be in [0, {tokenizer.vocab_size})"
            raise InvalidRequestError(message, param="tokens")
    return tokenizer.decode(tokens, skip_special_tokens=False)


async def reset_prefix_cache(request: Request) -> Response:
    """Forgets every cached block that no request holds."""
    state = server_state(request)
    await state.engine.reset_prefix_cache()
    return _json({"status": "ok"})

"""The FastAPI application: routes over one engine, behind the guards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from core.serve import routes
from core.serve.chat import create_chat_completion
from core.serve.completions import create_completion
from core.serve.errors import install_error_handlers
from core.serve.guard import ApiKeyGuard, BodyLimit, RequestIdLabel
from core.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from core.serve.state import ServerState
from core.serve.version import product_version

__all__ = ["ROUTES", "build_app"]

Handler = Callable[[Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler, type[BaseModel] | None], ...] = (
    ("POST", "/v1/completions", create_completion, CompletionRequest),
    ("POST", "/v1/chat/completions", create_chat_completion, ChatRequest),
    ("GET", "/v1/models", routes.list_models, None),
    ("GET", "/v1/models/{name:path}", routes.get_model, None),
    ("POST", "/tokenize", routes.tokenize, TokenizeRequest),
    ("POST", "/detokenize", routes.detokenize, DetokenizeRequest),
    ("GET", "/health", routes.health, None),
    ("GET", "/ping", routes.health, None),
    ("GET", "/version", routes.version, None),
    ("GET", "/load", routes.load, None),
    ("GET", "/metrics", routes.metrics, None),
)
"""Method, path, handler and shape of the body of every route."""

DEV_ROUTES: tuple[tuple[str, str, Handler, type[BaseModel] | None], ...] = (
    ("POST", "/reset_prefix_cache", routes.reset_prefix_cache, None),
)
"""Routes of `--enable-dev-routes`."""


def build_app(state: ServerState) -> FastAPI:
    """An application that answers for `state`, whose engine may be attached later."""
    guards = [Middleware(RequestIdLabel), Middleware(BodyLimit, limit=state.settings.max_body_bytes)]
    if state.settings.api_keys:
        guards.insert(0, Middleware(ApiKeyGuard, keys=state.settings.api_keys))
    app = FastAPI(
        title="core",
        version=product_version(),
        middleware=guards,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    install_error_handlers(app)
    for method, path, handler, shape in (*ROUTES, *(DEV_ROUTES if state.settings.dev_routes else ())):
        app.add_api_route(path, handler, methods=[method], openapi_extra=_body_schema(shape), response_model=None)
    return app


def _body_schema(shape: type[BaseModel] | None) -> dict[str, Any] | None:
    if shape is None:
        return None
    return {"requestBody": {"content": {"application/json": {"schema": shape.model_json_schema()}}, "required": True}}

"""Every error leaves as `{"error": {"message", "type", "param", "code"}}`, readable and bounded in size."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from core.errors import CoreError, EngineDeadError, InvalidRequestError, QueueFullError

__all__ = [
    "ApiError",
    "NotReadyError",
    "as_api_error",
    "error_body",
    "error_response",
    "first_problem",
    "install_error_handlers",
]

MAX_MESSAGE_CHARS = 2000
"""Longer messages are cut: a bad request must not be answered with more bytes than it had."""

log = logging.getLogger("core.serve")


class ApiError(CoreError):
    """An answer other than 200.

    Args:
        status: HTTP status.
        message: What is wrong, with the value, and what to do.
        kind: The `type` field of the body.
        param: Request field at fault.
        code: Short machine-readable reason.
        headers: Extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class NotReadyError(ApiError):
    """The server takes no requests now: it loads, drains, or its engine is down. 503 with Retry-After."""

    def __init__(self, message: str, *, code: str, retry_after_s: int = 5) -> None:
        super().__init__(
            503, message, kind="service_unavailable", code=code, headers={"Retry-After": str(retry_after_s)}
        )


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """The error object as JSON; `message` is cut to `MAX_MESSAGE_CHARS`."""
    message = message or "the request failed without a message; see the server's log"
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "... (cut)"
    message = message.encode("utf-8", "replace").decode("utf-8")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def as_api_error(error: BaseException) -> ApiError:
    """`error` with status, type and code. Anything not raised on purpose becomes a 500 that reveals nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(error.status, error.message, param=error.param, code=error.code or "invalid_value")
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after_s)}
        return ApiError(error.status, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, EngineDeadError):
        return NotReadyError(str(error), code="engine_dead")
    if isinstance(error, CoreError):
        return ApiError(500, str(error), kind="server_error", code="engine_error")
    message = "the server failed on this request; its log has the details"
    return ApiError(500, message, kind="server_error", code="internal_error")


def error_response(error: ApiError) -> Response:
    """The HTTP answer for `error`."""
    body = error_body(error.message, error.kind, error.param, error.code)
    return Response(body, status_code=error.status, headers=error.headers, media_type="application/json")


def first_problem(error: ValidationError) -> ApiError:
    """A 400 for the first thing that is wrong in a request body, naming the field; the rest is only counted."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in problem["loc"])[:200] or None
    message = problem["msg"].removeprefix("Value error, ")
    more = error.error_count() - 1
    if param is not None and problem["type"] != "value_error":
        message = f"{param}: {message}"
    if more > 0:
        message += f" (and {more} more)"
    code = "invalid_json" if problem["type"] == "json_invalid" else "invalid_value"
    return ApiError(400, message, param=param, code=code)


_HTTP_MESSAGES = {
    404: ("there is no route {method} {path}; see GET /openapi.json", "not_found"),
    405: ("{path} does not take {method}", "method_not_allowed"),
}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    template, code = _HTTP_MESSAGES.get(error.status_code, (str(error.detail), "http_error"))
    path = request.url.path[:200]
    message = template.format(method=request.method, path=path) if error.status_code in _HTTP_MESSAGES else template
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _core_error(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))


async def _unexpected_error(request: Request, error: Exception) -> Response:
    log.error("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
    return error_response(as_api_error(error))


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of `app` leave in the one shape."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(CoreError, _core_error)
    app.add_exception_handler(Exception, _unexpected_error)

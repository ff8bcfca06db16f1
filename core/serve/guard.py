"""ASGI middlewares in front of every route: API key, size of the body, request id."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from core.serve.errors import ApiError, error_response

__all__ = ["MAX_REQUEST_ID_CHARS", "OPEN_PATHS", "ApiKeyGuard", "BodyLimit", "RequestIdLabel", "check_request_id"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/load", "/metrics"})
"""Paths that need no key, compared exactly; every other path, known or not, is guarded."""

LINGER_S = 5.0
LINGER_BODIES = 4
"""How long, and for how many times the limit, the rest of a body that is too large is read."""

MAX_REQUEST_ID_CHARS = 256
"""Longest request id that a caller may choose."""


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


class ApiKeyGuard:
    """Answers 401 to every request without a known key, except on `OPEN_PATHS`.

    Keys are taken from `Authorization: Bearer KEY` and from `x-api-key: KEY`, and compared in constant time.
    """

    def __init__(self, app: Application, keys: tuple[str, ...]) -> None:
        self.app = app
        self.keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._known(scope):
            await self.app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        headers = {"WWW-Authenticate": "Bearer"}
        error = ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
        await error_response(error)(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = _header(scope, b"x-api-key")
        authorization = _header(scope, b"authorization") or b""
        if authorization[:7].lower() == b"bearer ":
            given = authorization[7:].strip()
        if given is None:
            return False
        known = False
        for key in self.keys:  # every key is compared, so that timing tells nothing
            known |= hmac.compare_digest(key, given)
        return known


class _BodyTooLargeError(Exception):
    """Stops whoever reads the body; no CoreError, which the application would answer itself."""


class BodyLimit:
    """Answers 413 to bodies above `limit` bytes, whether announced or sent in chunks.

    What a client still sends is read and thrown away for a while before it gets the answer: closing on it at once
    resets the connection, and most clients then report that and never see the answer.
    """

    def __init__(self, app: Application, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = _header(scope, b"content-length")
        try:
            if announced is not None and int(announced) > self.limit:
                raise _BodyTooLargeError
            await self.app(scope, self._counted(receive), send)
        except _BodyTooLargeError:
            if _header(scope, b"expect") is None:  # who asks first has sent nothing yet
                await _discard(receive, LINGER_BODIES * self.limit)
            await error_response(self._too_large())(scope, receive, send)

    def _counted(self, receive: Receive) -> Receive:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise _BodyTooLargeError
            return message

        return counted

    def _too_large(self) -> ApiError:
        message = f"the request body is above {self.limit} bytes; send less, or raise --max-request-bytes"
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


async def _discard(receive: Receive, num_bytes: int) -> None:
    """Reads the rest of a body and keeps nothing; gives up after `num_bytes` or `LINGER_S`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_bytes > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                num_bytes -= len(message.get("body", b""))


def check_request_id(value: str, field: str) -> None:
    """Raises ApiError (400) where a caller's request id is too long or not printable ASCII."""
    if len(value) > MAX_REQUEST_ID_CHARS:
        message = f"{field} has {len(value)} characters; send at most {MAX_REQUEST_ID_CHARS}"
        raise ApiError(400, message, param=field, code="invalid_request_id")
    if not value.isascii() or not value.isprintable():
        raise ApiError(400, f"{field} must be printable ASCII; send letters and digits", param=field)


class RequestIdLabel:
    """Returns a caller's `X-Request-Id` in the answer; refuses ids that are too long. An id is a label, never a key."""

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = _header(scope, b"x-request-id") if scope["type"] == "http" else None
        if label is None:
            await self.app(scope, receive, send)
            return
        try:
            check_request_id(label.decode("latin-1"), "X-Request-Id")
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", label)]
            await send(message)

        await self.app(scope, receive, labelled)

"""A small HTTP client for load: it streams one answer and takes little time of its own."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

from core.errors import CoreError

__all__ = ["AnswerError", "stream_events"]

MAX_LINE_BYTES = 4 * 1024 * 1024


class AnswerError(CoreError):
    """The server answered with an error, or not at all."""


async def stream_events(url: str, body: dict[str, Any], api_key: str | None) -> AsyncIterator[tuple[float, Any]]:
    """(time of arrival by `time.perf_counter`, JSON) of each server-sent event, without `[DONE]`.

    Raises:
        AnswerError: the status is not 200, or the connection broke.
    """
    parts = urllib.parse.urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None, limit=MAX_LINE_BYTES)
    except OSError as error:
        raise AnswerError(f"{parts.netloc} cannot be reached ({error}); start the server or check --base-url") from None
    try:
        writer.write(_request(parts, body, api_key))
        await writer.drain()
        status, chunked = await _read_head(reader)
        if status != 200:
            raise AnswerError(f"HTTP {status}: {(await reader.read(2000)).decode('utf-8', 'replace')[:500]}")
        async for line, at in _lines(reader, chunked):
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data:"):
                yield at, json.loads(line[5:])
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise AnswerError(f"the answer broke off: {type(error).__name__}: {error}") from None
    finally:
        writer.close()


def _request(parts: urllib.parse.SplitResult, body: dict[str, Any], api_key: str | None) -> bytes:
    data = json.dumps(body).encode()
    head = [
        f"POST {parts.path} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        "Accept: text/event-stream",
        "Connection: close",
    ]
    if api_key:
        head.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*head, "", ""]).encode() + data


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """(status, whether the body comes in chunks)."""
    status_line = await reader.readline()
    if not status_line:
        raise AnswerError("the server closed the connection without an answer; see its log")
    chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        chunked |= line.startswith(b"transfer-encoding:") and line.endswith(b"chunked")
    return int(status_line.split()[1]), chunked


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[tuple[bytes, float]]:
    """(line without its end, time at which it was complete)."""
    rest = b""
    while data := await (_chunk(reader) if chunked else reader.read(65536)):
        at = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r"), at


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline()).split(b";")[0] or b"0", 16)
    data = await reader.readexactly(size)
    await reader.readline()
    return data

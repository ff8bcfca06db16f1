"""Server-sent events, and what happens when a client goes away: its request is aborted at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.outputs import RequestOutput
from core.serve.errors import as_api_error, error_body

__all__ = ["DONE", "EventStream", "merge", "unless_disconnected"]

DONE = b"data: [DONE]\n\n"
"""The event that ends every stream without an error."""

Result = TypeVar("Result")
log = logging.getLogger("core.serve")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def unless_disconnected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result | None:
    """The result of `work`, or None where the client went away first; `work` is then cancelled and has ended."""
    worker = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            return None
        return worker.result()
    finally:
        await _cancel(listener)
        if not worker.done():
            await _cancel(worker)


async def merge(sources: Sequence[AsyncIterator[RequestOutput]]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(source index, output) of several requests as they come. Closing it closes, and so aborts, every source."""
    if len(sources) == 1:
        async with _closing(sources[0]) as source:
            async for output in source:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_feed(queue, index, source)) for index, source in enumerate(sources)]
    try:
        open_sources = len(tasks)
        while open_sources:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_sources -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]],
    index: int,
    source: AsyncIterator[RequestOutput],
) -> None:
    try:
        async with _closing(source):
            async for output in source:
                queue.put_nowait((index, output))
        queue.put_nowait((index, None))
    except Exception as error:  # handed to the reader, which raises it
        queue.put_nowait((index, error))


@contextlib.asynccontextmanager
async def _closing(source: AsyncIterator[RequestOutput]) -> AsyncIterator[AsyncIterator[RequestOutput]]:
    try:
        yield source
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


class EventStream(Response):
    """An answer of server-sent events.

    The first event is awaited before the status is sent, so that an error until then has its proper status. A later
    error is sent as an event with an `error` object, and the stream ends without `[DONE]`.

    Args:
        events: Complete events, each ending with an empty line. Closed when the client goes away.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events, DONE)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                await send({"type": "http.response.body", "body": _error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _error_event(error: Exception) -> bytes:
    shown = as_api_error(error)
    if shown.code == "internal_error":
        log.error("unexpected error in a stream", exc_info=error)
    return b"data: " + error_body(shown.message, shown.kind, shown.param, shown.code) + b"\n\n"

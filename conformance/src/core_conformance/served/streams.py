"""Server-sent events as the API frames them, and what a whole stream must be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from core_conformance.served.wire import ChatChunk, CompletionChunk, Usage, parse
from core_conformance.subject import Mismatch

__all__ = ["Streamed", "data_of", "read_stream"]

Chunk = ChatChunk | CompletionChunk
DONE = "[DONE]"


@dataclass
class Streamed:
    """What a stream came to, by index of the choice."""

    chunks: list[Chunk]
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: Usage | None = None


def data_of(text: str, what: str) -> Iterator[str]:
    """The data of each event; an event is one `data: ` line and an empty one, and nothing else.

    Raises:
        Mismatch: the text is framed otherwise.
    """
    events = text.split("\n\n")
    if events[-1] != "":
        raise Mismatch(f"{what}: the stream does not end with an empty line, but with {events[-1][-80:]!r}")
    for event in events[:-1]:
        if not event.startswith("data: ") or "\n" in event:
            raise Mismatch(f"{what}: an event is not one line of data: {event[:120]!r}")
        yield event.removeprefix("data: ")


def read_stream(reply: httpx.Response, shape: type[Chunk], what: str) -> Streamed:
    """Reads a whole stream and checks its course.

    Raises:
        Mismatch: status, content type, framing or a field is wrong; ids differ between chunks; a choice has no role, no
            or two finish reasons, or goes on behind one; there is no `[DONE]`, or something behind it.
    """
    if reply.status_code != 200:
        raise Mismatch(f"{what}: status {reply.status_code}: {reply.read()[:300]!r}")
    kind = reply.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise Mismatch(f"{what}: content-type is {kind!r}, not text/event-stream")
    *events, last = [*data_of(reply.read().decode("utf-8"), what)] or [""]
    if last != DONE or DONE in events:
        raise Mismatch(f"{what}: the stream must end with one [DONE], its last event is {last[:120]!r}")
    return course([parse(shape, event, what) for event in events], what)


def course(chunks: Sequence[Chunk], what: str) -> Streamed:
    """Adds the chunks up; see `read_stream`."""
    if not chunks:
        raise Mismatch(f"{what}: the stream holds no chunk")
    _must_agree(chunks, what)
    found = Streamed(chunks=list(chunks))
    for number, chunk in enumerate(chunks):
        if not chunk.choices and (number != len(chunks) - 1 or chunk.usage is None):
            raise Mismatch(f"{what}: chunk {number} of {len(chunks)} has no choice; only the last one may, with usage")
        found.usage = chunk.usage or found.usage
        for choice in chunk.choices:
            _add(found, choice, f"{what}: choice {choice.index} in chunk {number}")
    open_choices = sorted(set(found.texts) - set(found.finish_reasons))
    if open_choices:
        raise Mismatch(f"{what}: choices {open_choices} have no finish_reason")
    return found


def _must_agree(chunks: Iterable[Chunk], what: str) -> None:
    for name in ("id", "created", "model"):
        values = {getattr(chunk, name) for chunk in chunks}
        if len(values) != 1:
            raise Mismatch(f"{what}: {name} differs between chunks: {sorted(map(str, values))[:3]}")


def _add(found: Streamed, choice: Any, what: str) -> None:
    if choice.index in found.finish_reasons:
        raise Mismatch(f"{what} comes behind its finish_reason")
    if hasattr(choice, "delta"):
        first = choice.index not in found.texts
        if first is not (choice.delta.role == "assistant"):
            raise Mismatch(f"{what}: the role must be in the first chunk of a choice and in no other")
        text = choice.delta.content or ""
    else:
        text = choice.text
    found.texts[choice.index] = found.texts.get(choice.index, "") + text
    found.token_ids.setdefault(choice.index, []).extend(choice.token_ids or ())
    if choice.finish_reason is not None:
        found.finish_reasons[choice.index] = choice.finish_reason

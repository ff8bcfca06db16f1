"""`core batch`: a file of requests in OpenAI's batch format, run against the server's own application."""

from __future__ import annotations

import asyncio
import codecs
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from core.cli.progress import progress_bar
from core.config import EngineConfig
from core.errors import ConfigError
from core.serve.interface import ServedEngine

if TYPE_CHECKING:
    import httpx

    from core.serve.prompts import ChatRenderer

__all__ = ["BatchItem", "finished_ids", "read_items", "run_batch", "run_items"]

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_TRIES = 5
"""Tries of a request that gets 429 or 503."""


class BatchItem(msgspec.Struct):
    """One line of the input; `problem` says why it cannot be sent."""

    custom_id: str
    url: str = ""
    body: dict[str, Any] = msgspec.field(default_factory=dict)
    problem: str | None = None


def read_items(path: Path) -> Iterator[BatchItem]:
    """The requests of the file in order. A line that is no request is an item with a `problem`.

    Raises:
        ConfigError: the file cannot be read, or two lines have one custom_id.
    """
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                item = _read_item(line, number)
                if item.custom_id in seen:
                    raise ConfigError(
                        f"{path} line {number}: custom_id {item.custom_id!r} was used before; make it unique"
                    )
                seen.add(item.custom_id)
                yield item
    except OSError as error:
        raise ConfigError(f"batch file {str(path)!r} cannot be read: {error.strerror}; check the path") from None


def _read_item(line: bytes, number: int) -> BatchItem:
    unnamed = f"line-{number}"
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BatchItem(unnamed, problem=f"line {number} is no JSON: {error}")
    if not isinstance(raw, dict) or not isinstance(raw.get("custom_id"), str):
        return BatchItem(unnamed, problem=f"line {number} must be an object with a custom_id")
    name, url, body = raw["custom_id"], raw.get("url"), raw.get("body")
    if raw.get("method", "POST") != "POST" or url not in URLS:
        return BatchItem(name, problem=f"line {number} must have method POST and url {' or '.join(URLS)}, got {url!r}")
    if not isinstance(body, dict) or body.get("stream"):
        return BatchItem(name, problem=f"line {number} must have a body, an object without stream")
    return BatchItem(name, url, body)


def finished_ids(path: Path) -> set[str]:
    """custom_ids that the output file holds already; a last line that was cut off is removed from the file.

    Raises:
        ConfigError: the file is no output of a batch.
    """
    if not path.exists():
        return set()
    done: set[str] = set()
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            done.add(_finished_id(line, path))
    os.truncate(path, end)
    return done


def _finished_id(line: bytes, path: Path) -> str:
    try:
        return str(msgspec.json.decode(line)["custom_id"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = f"{str(path)!r} is not the output of a batch; give another --output-file"
        raise ConfigError(message) from None


def run_batch(config: EngineConfig, file: str, output: str | None, names: tuple[str, ...]) -> None:
    """Runs what the output does not hold yet, and appends to it.

    Raises:
        CoreError: a file is wrong, or the model cannot be served. A request that fails does not raise.
    """
    from core.engine.async_engine import AsyncEngine
    from core.serve.chat_template import chat_renderer

    source = Path(file)
    target = Path(output) if output else source.with_suffix(".out.jsonl")
    if target.resolve() == source.resolve():
        raise ConfigError(f"--output-file {str(target)!r} is the input; give another")
    done = finished_ids(target)
    items = [item for item in read_items(source) if item.custom_id not in done]
    if not items:
        return

    async def work() -> None:
        engine = await AsyncEngine.start(config)
        try:
            with target.open("ab") as out:
                renderer, concurrency = chat_renderer(engine), config.scheduler.max_num_seqs
                await run_items(engine, renderer, config.model, names, items, out, concurrency)
        finally:
            await engine.shutdown()

    asyncio.run(work())


async def run_items(
    engine: ServedEngine,
    renderer: ChatRenderer,
    model: str,
    names: tuple[str, ...],
    items: list[BatchItem],
    out: IO[bytes],
    concurrency: int,
) -> None:
    """Sends the items, at most `concurrency` at once, and writes a line for each as it ends."""
    import httpx

    from core.serve.app import build_app
    from core.serve.settings import ServeSettings
    from core.serve.state import ServerState

    app = build_app(ServerState(ServeSettings(served_model_names=names), model, engine, renderer))
    waiting = iter(items)
    with progress_bar("requests", len(items)) as advance:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:

            async def worker() -> None:
                for item in waiting:
                    line = await _result(client, item)
                    out.write(msgspec.json.encode(line) + b"\n")
                    out.flush()
                    advance()

            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(items))):
                    group.create_task(worker())


async def _result(client: httpx.AsyncClient, item: BatchItem) -> dict[str, Any]:
    """The output line of an item."""
    line: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": item.custom_id}
    if item.problem is not None:
        return {**line, "response": None, "error": {"code": "invalid_line", "message": item.problem}}
    for attempt in range(MAX_TRIES):
        reply = await client.post(item.url, json=item.body)
        if reply.status_code not in (429, 503):
            break
        await asyncio.sleep(min(float(reply.headers.get("retry-after", 1)), 2.0**attempt))
    body = reply.json()
    response = {"status_code": reply.status_code, "request_id": line["id"], "body": body}
    error = None
    if reply.status_code != 200:
        error = {"code": body["error"]["code"], "message": body["error"]["message"]}
    return {**line, "response": response, "error": error}

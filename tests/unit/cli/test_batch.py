"""`core batch`: files in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, says

from core.cli.batch import finished_ids, read_items, run_items
from core.errors import ConfigError
from core.serve.prompts import ChatRenderer

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


def line(custom_id: str, body: dict[str, Any] | None = None, url: str = "/v1/chat/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or CHAT}) + "\n"


def run(engine: FakeEngine, source: Path, target: Path) -> list[dict[str, Any]]:
    done = finished_ids(target)
    items = [item for item in read_items(source) if item.custom_id not in done]
    with target.open("ab") as out:
        asyncio.run(run_items(engine, ChatRenderer(engine.template), "m", (), items, out, 2))
    return [json.loads(text) for text in target.read_text().splitlines()]


def test_answers_and_errors_are_lines(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        line("a")
        + line("b", {"model": "m", "prompt": "x", "max_tokens": 3}, "/v1/completions")
        + line("bad", {**CHAT, "messages": []})
        + line("model", {**CHAT, "model": "other"})
        + "\n"
        + line("stream", {**CHAT, "stream": True})
        + line("url", CHAT, "/v1/embeddings")
        + "not json\n"
        + '{"custom_id": 5}\n'
    )
    engine = FakeEngine(reply=says("Hello"))
    found = {entry["custom_id"]: entry for entry in run(engine, source, target)}
    assert set(found) == {"a", "b", "bad", "model", "stream", "url", "line-8", "line-9"}
    assert found["a"]["response"]["status_code"] == 200
    assert found["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    assert found["a"]["error"] is None
    assert found["b"]["response"]["body"]["choices"][0]["text"] == "Hel"
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "messages"
    assert found["bad"]["error"]["message"]
    assert found["model"]["error"]["code"] == "model_not_found"
    for name in ("stream", "url", "line-8", "line-9"):
        assert found[name]["response"] is None
        assert found[name]["error"]["code"] == "invalid_line"


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(name) for name in "abcd"))
    engine = FakeEngine(reply=says("Hello"))
    whole = run(engine, source, target)
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:2]) + lines[2][:25])
    again = FakeEngine(reply=says("Hello"))
    repaired = run(again, source, target)
    assert [entry["custom_id"] for entry in repaired[:2]] == [entry["custom_id"] for entry in whole[:2]]
    assert sorted(entry["custom_id"] for entry in repaired) == list("abcd")
    assert len(again.seen) == 2
    assert run(FakeEngine(), source, target) == repaired


def test_a_whole_last_line_without_its_end_is_done_again(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text('{"custom_id": "a"}\n{"custom_id": "b"}')
    assert finished_ids(target) == {"a"}
    assert target.read_text() == '{"custom_id": "a"}\n'


def test_a_foreign_output_file_is_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("hello\nworld")
    with pytest.raises(ConfigError, match="not the output of a batch"):
        finished_ids(target)
    assert target.read_text() == "hello\nworld"


def test_equal_ids_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line("a") + line("a"))
    with pytest.raises(ConfigError, match="line 2"):
        list(read_items(source))


def test_an_engine_that_is_down_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a"))
    engine = FakeEngine(reply=says("Hello"), state="restarting", reason="it died")
    slept: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            slept.append(seconds)
            engine.state = "healthy"
        await real_sleep(0)

    monkeypatch.setattr("core.cli.batch.asyncio.sleep", sleep)
    assert run(engine, source, target)[0]["response"]["status_code"] == 200
    assert slept == [1.0]


def test_a_byte_order_mark_in_front_of_the_file_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\r\n')
    assert [(item.custom_id, item.problem) for item in read_items(path)] == [("a", None)]

"""`core run` and `core generate` over a scripted engine."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, says

from core.cli.chat import Conversation, converse
from core.cli.generate import read_prompts, run_prompts
from core.errors import ConfigError
from core.sampling_params import SamplingParams
from core.serve.prompts import ChatRenderer

PARAMS = SamplingParams(temperature=0.0, max_tokens=None)


def talk(engine: FakeEngine, lines: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Conversation:
    answers = iter(lines)

    def read(_: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    conversation = Conversation("Be brief.")
    with asyncio.Runner() as runner:
        converse(runner, engine, ChatRenderer(engine.template), conversation, PARAMS)
    return conversation


def test_a_conversation_remembers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(reply=says("Hello"))
    conversation = talk(engine, ["hi", "", "again", "/bye", "never asked"], monkeypatch)
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert engine.template.calls[1]["messages"][2] == {"role": "assistant", "content": "Hello"}
    assert capsys.readouterr().out == "Hello\nHello\n"


def test_clear_forgets_all_but_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = talk(FakeEngine(reply=says("Hello")), ["hi", "/clear"], monkeypatch)
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_mistakes_do_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(reply=says("Hello"), max_model_len=60)
    conversation = talk(engine, ["/what", "x" * 200, "hi"], monkeypatch)
    errors = capsys.readouterr().err
    assert "no command /what" in errors
    assert "error: the prompt has" in errors
    assert [message["content"] for message in conversation.messages[1:]] == ["hi", "Hello"]


def test_a_stopped_answer_is_kept_and_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(step_s=0.0, max_model_len=100_000)

    def reply(request: Any, choice: int) -> list[int]:
        return [97] * 90_000

    engine.reply = reply
    choose = engine._choice

    def interrupted(*args: Any) -> Any:
        if engine.steps == 5:
            signal.raise_signal(signal.SIGINT)
        return choose(*args)

    monkeypatch.setattr(engine, "_choice", interrupted)
    conversation = talk(engine, ["hi", "/bye"], monkeypatch)
    last = conversation.messages[-1]
    assert last["role"] == "assistant"
    assert 3 < len(last["content"]) < 10
    assert engine.running == 0


def generate(engine: FakeEngine, prompts: list[str], params: SamplingParams, *, as_json: bool) -> None:
    asyncio.run(run_prompts(engine, prompts, params, 2, as_json=as_json))


def test_one_prompt_gives_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    generate(FakeEngine(reply=says("Hello")), ["hi"], SamplingParams(max_tokens=10), as_json=False)
    assert capsys.readouterr().out == "Hello\n"


def test_lines_of_json_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["a", "bad" * 300, "c"]
    engine = FakeEngine(reply=says("Hello"))
    generate(engine, prompts, SamplingParams(max_tokens=10, n=2, logprobs=2), as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert "context window" in lines[1]["error"]
    assert [output["index"] for output in lines[0]["outputs"]] == [0, 1]
    assert len(lines[0]["outputs"][0]["logprobs"][0]["top_logprobs"]) == 2


def test_prompts_come_from_flags_files_and_pipes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.txt"
    file.write_text("one\n\ntwo\n")
    assert read_prompts(["zero"], str(file)) == ["zero", "one", "two"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\ntext"))
    assert read_prompts([], None) == ["piped\ntext"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert read_prompts([], "-") == ["a", "b"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompts([], None)


def test_a_prompt_file_from_another_system_has_its_lines_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo\u2028still two\x0bstill\n\nthree".encode())
    assert read_prompts([], str(path)) == ["one", "two\u2028still two\x0bstill", "three"]

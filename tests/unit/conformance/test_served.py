"""L4's own parts without a server: the wire models, the course of a stream, leaks, tasks, and how a server is ended."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from core_conformance import Outcome, load_target, run_suite
from core_conformance.engines.goldens import greedy
from core_conformance.records import ErrorOutcome
from core_conformance.served import accuracy, task_data
from core_conformance.served.copying import STOP, copy_answer, copy_prompt, ids_of
from core_conformance.served.leaks import Footprint, must_not_grow
from core_conformance.served.options import ServedOptions
from core_conformance.served.server import Server
from core_conformance.served.streams import course, data_of
from core_conformance.served.wire import ChatChunk, ChatCompletion, Completion, CompletionChunk, ErrorBody, parse
from core_conformance.subject import Mismatch
from core_conformance.tolerance import COPY_MODEL_GAP

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 0},
}
HEAD = {"id": "cmpl-12345", "created": 1_790_000_000, "model": "m"}
TEXT_CHOICE = {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
COMPLETION = {**HEAD, "object": "text_completion", "choices": [TEXT_CHOICE], "usage": USAGE}
MESSAGE = {"role": "assistant", "content": "ab", "refusal": None}
CHAT_CHOICE = {"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
CHAT = {**HEAD, "object": "chat.completion", "choices": [CHAT_CHOICE], "usage": USAGE}
LOGPROBS = {"tokens": ["a", "b"], "token_logprobs": [-0.1, -0.2], "top_logprobs": None, "text_offset": [0, 1]}


def raw(body: dict[str, Any], **changes: Any) -> str:
    return json.dumps({**body, **changes})


def test_right_answers_are_taken() -> None:
    parse(Completion, raw(COMPLETION), "completion")
    parse(ChatCompletion, raw(CHAT), "chat")
    parse(Completion, raw(COMPLETION, choices=[{**TEXT_CHOICE, "logprobs": LOGPROBS}]), "completion")
    parse(
        ErrorBody, json.dumps({"error": {"message": "n is 0", "type": "x_error", "param": None, "code": None}}), "error"
    )


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (raw(COMPLETION, colour="red"), "colour"),
        (raw(COMPLETION, object="completion"), "object"),
        (raw(COMPLETION, created=1.5), "created"),
        (raw(COMPLETION, choices=[]), "choices"),
        (raw(COMPLETION, choices=[{**TEXT_CHOICE, "finish_reason": "eos"}]), "finish_reason"),
        (raw(COMPLETION, choices=[{**TEXT_CHOICE, "finish_reason": None}]), "finish_reason"),
        (raw(COMPLETION, choices=[{**TEXT_CHOICE, "text": None}]), "text"),
        (raw(COMPLETION, usage={**USAGE, "total_tokens": 8}), "total_tokens"),
        (raw(COMPLETION, usage={**USAGE, "prompt_tokens": "5"}), "prompt_tokens"),
        (raw(COMPLETION, usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 6}}), "cached"),
        (raw(COMPLETION, choices=[{**TEXT_CHOICE, "logprobs": {**LOGPROBS, "text_offset": [0]}}]), "logprobs"),
        (raw(COMPLETION, choices=[{**TEXT_CHOICE, "logprobs": {**LOGPROBS, "token_logprobs": [0.5, 0]}}]), "logprobs"),
        (json.dumps({key: value for key, value in COMPLETION.items() if key != "usage"}), "usage"),
        ("{", "body"),
    ],
)
def test_a_wrong_missing_or_unknown_field_is_named(body: str, place: str) -> None:
    with pytest.raises(Mismatch, match=place):
        parse(Completion, body, "completion")


def chunk(text: str, **more: Any) -> CompletionChunk:
    choice = {**TEXT_CHOICE, "text": text, "finish_reason": None, **more}
    return parse(CompletionChunk, raw(HEAD, object="text_completion", choices=[choice]), "chunk")


def chat_chunk(delta: dict[str, str], finish: str | None = None) -> ChatChunk:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return parse(ChatChunk, raw(HEAD, object="chat.completion.chunk", choices=[choice]), "chunk")


def test_a_good_stream_is_added_up() -> None:
    found = course([chunk("a"), chunk("b", finish_reason="stop")], "stream")
    assert found.texts == {0: "ab"} and found.finish_reasons == {0: "stop"} and found.usage is None
    chat = course([chat_chunk({"role": "assistant", "content": ""}), chat_chunk({"content": "a"}, "stop")], "stream")
    assert chat.texts == {0: "a"}


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([], "no chunk"),
        ([chunk("a")], "no finish_reason"),
        ([chunk("a", finish_reason="stop"), chunk("b")], "behind its finish_reason"),
        ([chunk("a"), chunk("b", finish_reason="stop").model_copy(update={"id": "cmpl-other"})], "id differs"),
        ([chat_chunk({"content": "a"}, "stop")], "role must be in the first chunk"),
        ([chat_chunk({"role": "assistant"}), chat_chunk({"role": "assistant"}, "stop")], "role must be"),
        ([chunk("a", finish_reason="stop").model_copy(update={"choices": []}), chunk("b")], "has no choice"),
    ],
)
def test_a_stream_out_of_order_is_refused(chunks: list[Any], words: str) -> None:
    with pytest.raises(Mismatch, match=words):
        course(chunks, "stream")


@pytest.mark.parametrize("text", ["data: {}", "data: {}\ndata: {}\n\n", "event: x\n\n", ": ping\n\n"])
def test_events_are_framed_one_way(text: str) -> None:
    with pytest.raises(Mismatch):
        list(data_of(text, "stream"))


def test_growth_within_the_allowance_passes_and_above_it_is_named() -> None:
    before = Footprint(memory_bytes=10**8, descriptors=40, threads=20, processes=2)
    after, worst, share = must_not_grow(before, lambda: Footprint(10**8, 42, 20, 2))
    assert (after.descriptors, worst, share) == (42, "descriptors", 0.5)
    with pytest.raises(Mismatch, match="threads grew from 20 to 90"):
        must_not_grow(before, lambda: Footprint(10**8, 40, 90, 2), patience_s=0.0)


def test_growth_that_goes_away_is_waited_for() -> None:
    seen = iter([90, 60, 20])
    before = Footprint(10**8, 40, 20, 2)
    after, _, _ = must_not_grow(before, lambda: Footprint(10**8, 40, next(seen), 2))
    assert after.threads == 20


@pytest.mark.parametrize("length", [38, 170])
def test_the_copy_model_says_what_copying_predicts(length: int) -> None:
    prompt = copy_prompt(length, seed=length)
    golden = greedy("copy", ids_of(prompt), 16)
    assert golden.tokens == ids_of(copy_answer(prompt, 16))
    assert min(golden.gaps) >= COPY_MODEL_GAP


@pytest.mark.parametrize(
    ("name", "documents"), [("copy_choice", task_data.choice_documents), ("copy_text", task_data.text_documents)]
)
def test_the_shipped_documents_are_what_their_module_makes(
    name: str, documents: Callable[[], list[dict[str, Any]]]
) -> None:
    lines = (task_data.TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == documents()


def test_one_document_in_ten_is_wrong_on_purpose_and_lengths_differ() -> None:
    right = [d["choices"][d["label"]] == copy_answer(d["prompt"], 6) for d in task_data.choice_documents()]
    texts = task_data.text_documents()
    said = [copy_answer(d["prompt"], 37).partition(STOP)[0] == d["answer"] for d in texts]
    for outcomes in (right, said):
        assert 0.85 <= sum(outcomes) / len(outcomes) < 1
    assert len({len(document["answer"]) for document in texts}) > 10


def test_a_backend_that_is_not_installed_is_an_error_of_l4() -> None:
    report = run_suite(load_target("reference"), ["L4"], select=lambda check_id: check_id == "L4/wire/models")
    [record] = [record for record in report.records if record.id == "L4/wire/models"]
    assert record.outcome is Outcome.ERROR
    assert "'reference' is no installed package" in record.reason and not report.ok


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ErrorOutcome, match=r"pip install 'core-conformance\[accuracy\]'"):
        accuracy.require_lm_eval()


def test_scores_leave_out_what_rounding_decides() -> None:
    served = [{"score": 0.0, "text": "abc"}, {"score": 1.0, "text": "ab"}, {"score": 1.0, "text": "a"}]
    margins = [0.01, 3.0, None]
    reference = [{"score": 1.0, "text": "abcd", "margin": margin} for margin in margins]
    scores = accuracy._scores({"served": served, "reference": reference}, len)
    assert (scores.served, scores.reference, scores.documents, scores.ambiguous) == (2.0, 2.0, 2, 1)
    assert scores.accuracy_share == 1.0 and scores.length_share == 6 / 12


def test_a_server_that_ends_at_its_start_is_told_with_its_log() -> None:
    server = Server([sys.executable, "-c", "print('no such chip'); raise SystemExit(3)"], {}, 30.0)
    with pytest.raises(Mismatch, match=r"exit code 3 at its start: no such chip"):
        server.start()
    assert not server.alive and not server.family()


def test_a_server_that_never_is_healthy_is_ended() -> None:
    server = Server([sys.executable, "-c", "import time; time.sleep(600)"], {}, 1.0)
    with pytest.raises(Mismatch, match="not healthy after 1 s"):
        server.start()
    assert not server.alive


def test_a_server_ends_when_the_suite_is_killed(tmp_path: Path) -> None:
    """Whoever started it is killed with SIGKILL, which nobody can catch: the server ends all the same."""
    server = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    suite = (
        "import sys; from core_conformance.served.server import Server; "
        f"Server([sys.executable, '-c', {server!r}], {{}}, 600.0).start()"
    )
    killed = subprocess.Popen([sys.executable, "-c", suite])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    time.sleep(0.5)  # its watcher starts right behind it
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    while _exists(pid):
        assert time.monotonic() < deadline, "the server outlived the suite"
        time.sleep(0.1)


def _exists(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_options_have_the_documented_defaults() -> None:
    assert ServedOptions() == ServedOptions(model=None, soak_seconds=8.0)


@pytest.mark.timeout(600)
def test_the_wire_format_of_a_served_engine() -> None:
    """The part of L4 that fits here, through the command; `nox -s served` runs all of it."""
    if "sim" not in {entry.name for entry in entry_points(group="core.backends")}:
        pytest.skip("core-backend-sim is not installed; pip install -e backends/sim")
    command = [sys.executable, "-m", "core.cli", "conformance", "run", "--backend", "sim", "--level", "L4", "-v"]
    done = subprocess.run([*command, "-k", "L4/wire"], capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("PASS")]
    assert len(passed) > 25 and all(check_id.startswith("L4/wire") for check_id in passed)

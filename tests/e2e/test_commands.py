"""The commands of `core` over a real engine: text in, text out, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
from core_process import command_line, default_device, environment, run_core

TINY = ("--dtype", "float32", "--threads", "1")
NUM_LINES = 200


def flags() -> tuple[str, ...]:
    return ("--device", default_device(), *TINY)


def test_generate_writes_one_object_a_prompt(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\nsecond\n", encoding="utf-8")
    args = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--json", "--logprobs", "2")
    done = run_core("generate", str(tiny_llama), "--prompt-file", str(prompts), "-p", "third", *args, *flags())
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["third", "first", "second"]
    for line in lines:
        assert line["prompt_token_ids"] == list(_ids(line["prompt"]))
        [choice] = line["outputs"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]) == 6
        assert choice["finish_reason"] == "length"


def _ids(text: str) -> bytes:
    """Ids of the tiny tokenizer: printable ASCII comes first in its byte alphabet."""
    return bytes(byte - 33 for byte in text.encode())


def test_generate_takes_piped_text(tiny_llama: Path) -> None:
    args = ("--temperature", "0", "--max-tokens", "3", "--ignore-eos")
    done = run_core("generate", str(tiny_llama), *args, *flags(), stdin="hello")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1
    assert "error" not in done.stdout


def test_run_answers_piped_input_once(tiny_llama: Path) -> None:
    done = run_core("run", str(tiny_llama), "--max-tokens", "5", "--temperature", "0", *flags(), stdin="Hello\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert len(done.stdout) > 1


def batch_lines(count: int) -> str:
    bodies = [{"prompt": f"request {i}", "max_tokens": 40, "temperature": 0, "ignore_eos": True} for i in range(count)]
    items = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"model": "m", **body}}
        for i, body in enumerate(bodies)
    ]
    return "".join(json.dumps(item) + "\n" for item in items)


def results(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_killed_batch_goes_on_where_it_was(tiny_llama: Path, tmp_path: Path) -> None:
    """The whole process is killed in the middle; the second run does the rest and nothing twice."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(batch_lines(NUM_LINES), encoding="utf-8")
    args = ("batch", str(source), "--model", str(tiny_llama), "-o", str(target), "--served-model-name", "m", *flags())
    args = (*args, "--max-num-seqs", "2")
    first = subprocess.Popen(command_line(*args), stderr=subprocess.PIPE, env=environment())
    try:
        deadline = time.monotonic() + 120
        while not target.exists() or target.read_bytes().count(b"\n") < 4:
            assert first.poll() is None, first.stderr and first.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        children = psutil.Process(first.pid).children(recursive=True)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "the engine outlived the command"
    kept = target.read_bytes()
    num_done = kept.count(b"\n")
    assert 4 <= num_done < NUM_LINES, "the kill came too late: nothing was tested"
    with target.open("ab") as out:
        out.write(b'{"id": "cut o')
    second = run_core(*args)
    assert second.returncode == 0, second.stderr
    found = results(target)
    assert target.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert sorted(str(item["custom_id"]) for item in found) == sorted(f"r{i}" for i in range(NUM_LINES))
    assert all(item["error"] is None for item in found)


def test_doctor_says_how_each_operation_runs(tiny_llama: Path) -> None:
    done = run_core("doctor", "--model", str(tiny_llama), "--json", *flags())
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["backend"].partition(":")[0] == default_device()
    kinds = {row["operation"]: row["kind"] for row in report["operations"]}
    assert {"attention", "linear", "rms_norm", "embed"} <= kinds.keys()
    assert set(kinds.values()) <= {"NATIVE", "COMPOSITE"}
    assert kinds["attention"] == "NATIVE"
    assert report["usable"] is True
    assert len(report["table_hash"]) >= 8


def test_backends_lists_devices() -> None:
    done = run_core("backends", "--json")
    assert done.returncode == 0, done.stderr
    found = {item["name"]: item for item in json.loads(done.stdout)}
    mine = found[default_device()]
    assert mine["error"] is None
    assert mine["devices"]
    assert mine["api"][0] == 1


def test_bench_offline_counts_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    sizes = ("--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--output-json", str(target))
    done = run_core("bench", "offline", str(tiny_llama), *sizes, *flags())
    assert done.returncode == 0, done.stderr
    result = json.loads(target.read_text(encoding="utf-8"))
    assert result["total_num_tokens"] == 3 * 24
    assert result["output_tokens_per_second"] > 0

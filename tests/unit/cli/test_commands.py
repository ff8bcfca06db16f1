"""The command in a process of its own: start-up, errors, exit codes."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest


def test_help_needs_no_heavy_import(command: Any) -> None:
    done = command("--help")
    assert done.returncode == 0
    for name in ("serve", "run", "generate", "batch", "pull", "bench", "backends", "doctor", "version"):
        assert name in done.stdout


@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"], ["version"]])
def test_light_commands_import_no_torch(args: list[str]) -> None:
    import subprocess

    code = (
        "import sys; sys.argv = ['core', *sys.argv[1:]]\n"
        "from core.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'fastapi', 'uvicorn'} & sys.modules.keys()\n"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "m", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["serve", "m", "--port", "99999"], "--port"),
        (["serve", "m", "--swap-space", "lots"], "--swap-space"),
        (["serve", "m", "--config", "missing.yaml"], "missing.yaml"),
        (["batch", "missing.jsonl", "--model", "m"], "missing.jsonl"),
        (["generate", "m", "--prompt-file", "missing.txt"], "missing.txt"),
        (["generate", "m"], "no prompt"),
        (["run", "m"], "standard input is empty"),
        (["bench", "serve", "--num-prompts", "0"], "--num-prompts"),
        (["bench", "serve", "--goodput", "x:1"], "--goodput"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-prompts", "1"], "127.0.0.1:9"),
        (["pull", "no such model"], "no such model"),
        (["serve", "no-such-model", "--port", "0"], "no-such-model"),
        (["serve", "no-such-model", "--port", "0", "--chat-template", "missing.jinja"], "missing.jinja"),
    ],
)
def test_mistakes_are_one_line_without_a_traceback(command: Any, args: list[str], words: str) -> None:
    done = command(*args)
    assert done.returncode in (1, 2)
    lines = [line for line in done.stderr.splitlines() if line]
    assert lines[-1].startswith("error: ")
    assert words in lines[-1]
    assert "Traceback" not in done.stderr


def test_unknown_flags_and_commands(command: Any) -> None:
    for args in (["serve", "m", "--no-such-flag"], ["nope"], ["serve"]):
        done = command(*args)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said_before_loading(command: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = command("serve", "no-such-model", "--host", "127.0.0.1", "--port", port)
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr


def test_backends_lists_as_json(command: Any) -> None:
    done = command("backends", "--json")
    assert done.returncode == 0
    for listing in json.loads(done.stdout):
        assert set(listing) == {"name", "package", "vendor", "api", "priority", "devices", "error", "passed_over"}


def test_version(command: Any) -> None:
    assert command("version").stdout.strip()

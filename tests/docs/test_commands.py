"""Every command in the documents: run here with small substitutes, or owned by a test that is named here."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from core_process import CoreServer, command_line, default_device, environment, run_core, served
from markdown_blocks import REPO_ROOT, blocks, commands, documents
from tiny import make_tiny

MODELS = ("models/smollm2", "smollm2-135m-instruct", "gemma3-270m", "MODEL")
"""Names that stand for the reader's model."""

SMALL = {
    "core run": ["--max-tokens", "4", "--temperature", "0"],
    "core generate": ["--max-tokens", "4"],
    "core batch": [],
    "core backends": [],
    "core doctor": [],
    "core version": [],
    "core bench offline": ["--num-prompts", "2", "--input-len", "8", "--output-len", "2"],
    "core bench perplexity": ["--num-tokens", "40", "--window", "16"],
    "core bench serve": [
        *("--num-prompts", "3", "--random-input-len", "16", "--random-output-len", "4", "--vocab-size", "256"),
        *("--prefix-repetition-prefix-len", "16", "--prefix-repetition-suffix-len", "8"),
        *("--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "4"),
    ],
}
"""Commands that are run as they stand, and what is appended to make them small; of a flag given twice the last wins."""

NO_DEVICE = ("core backends", "core version", "core bench serve")

OWNED = {
    "core serve": "test_served_as_documented",
    "curl": "test_curl_as_documented",
    "core pull": "test_pull_as_documented",
    "python3 -m venv": "test_setup_commands.py",
    ".venv/bin/nox": "test_setup_commands.py",
    "pip install": "test_setup_commands.py",
    "pytest ": "test_setup_commands.py",
    "python ": "test_setup_commands.py",
    "core conformance": "test_conformance_command_as_documented",
}
"""Beginnings of commands that have a test of their own."""

WALKED = "writing-a-backend.md"
"""Its commands are run by test_backend_walk.py, over the package that its blocks make."""


def all_commands() -> list[tuple[str, str]]:
    """(document, command), each once."""
    found: dict[tuple[str, str], None] = {}
    for path in documents(REPO_ROOT):
        for block in blocks(path):
            found |= dict.fromkeys((str(path.relative_to(REPO_ROOT)), command) for command in commands(block))
    return list(found)


def core_part(command: str) -> str:
    """The command after `echo TEXT |`."""
    return command.rpartition("| ")[2]


def runnable(command: str) -> str | None:
    """The key of SMALL that the command begins with."""
    return next((key for key in SMALL if core_part(command).startswith(key)), None)


def starting(prefix: str) -> list[tuple[str, str]]:
    return [(doc, command) for doc, command in all_commands() if command.startswith(prefix) and WALKED not in doc]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("docs") / "tiny", max_position_embeddings=512)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[CoreServer]:
    """The tiny model under the names that the documents use."""
    names = ("--served-model-name", "smollm2", "--served-model-name", "smollm2-135m-instruct")
    with served(tiny_model, *names, name=None) as server:
        yield server


def substituted(command: str, model: Path) -> list[str]:
    """Words of the command with the model in place of the reader's, and the device of these tests."""
    words = [str(model) if word in MODELS else word for word in shlex.split(command)]
    return [default_device() if word == "NAME" else word for word in words]


def test_there_are_commands_to_test() -> None:
    found = [command for _, command in all_commands()]
    assert sum(command.startswith("core ") for command in found) >= 12
    assert sum(command.startswith("curl ") for command in found) >= 2


@pytest.mark.parametrize(("document", "command"), all_commands())
def test_every_command_has_a_test(document: str, command: str) -> None:
    owned = WALKED in document or any(command.startswith(prefix) for prefix in OWNED)
    assert owned or runnable(command) is not None, f"{document}: {command!r} is run by no test; see SMALL and OWNED"


@pytest.mark.parametrize(
    ("document", "command"), [(d, c) for d, c in all_commands() if runnable(c) and WALKED not in d]
)
def test_runs_as_documented(
    document: str, command: str, tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    key = runnable(command)
    assert key is not None
    args = [*substituted(core_part(command), tiny_model)[1:], *SMALL[key]]
    if key == "core bench serve":
        args += ["--base-url", request.getfixturevalue("server").url]
    if key not in NO_DEVICE:
        args += ["--device", default_device(), "--threads", "1"]
    if key == "core batch":
        batch_line = next(b for b in blocks(REPO_ROOT / "docs/cli.md") if '"custom_id"' in b.text)
        small = json.loads(batch_line.text)
        small["body"]["max_tokens"] = 4
        (tmp_path / "requests.jsonl").write_text(json.dumps(small) + "\n", encoding="utf-8")
    stdin = shlex.split(command)[1] if command.startswith("echo ") else "Hello\n"
    done = run_core(*args, stdin=stdin, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if key == "core batch":
        [result] = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
        assert json.loads(result)["error"] is None
    else:
        assert done.stdout.strip()


@pytest.mark.parametrize(("document", "command"), starting("core serve "))
def test_served_as_documented(document: str, command: str, tiny_model: Path) -> None:
    words = shlex.split(command)[2:]
    flags = ["256" if before == "--max-model-len" else word for before, word in pairwise(words)]
    name = None if "--served-model-name" in flags else words[0]
    with served(tiny_model, *flags, name=name) as server:
        public = flags[flags.index("--served-model-name") + 1] if name is None else name
        assert [model["id"] for model in server.get("/v1/models").json()["data"]] == [public]


@pytest.mark.parametrize(("document", "command"), starting("curl "))
def test_curl_as_documented(document: str, command: str, server: CoreServer) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    words = [_at(server, word) for word in shlex.split(command)]
    words = [word.replace("}]}", '}], "max_tokens": 8}') if "max_tokens" not in word else word for word in words]
    done = subprocess.run([*words, "-sS", "--fail-with-body"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reply = json.loads(done.stdout)
    assert reply["choices"][0]["message"]["role"] == "assistant"
    assert reply["usage"]["completion_tokens"] > 0


def _at(server: CoreServer, text: str) -> str:
    """The text with the server's address in place of the documents'."""
    return text.replace("http://127.0.0.1:8000", server.url).replace("http://localhost:8000", server.url)


@pytest.mark.model
@pytest.mark.parametrize(("document", "command"), starting("core pull "))
def test_pull_as_documented(document: str, command: str) -> None:
    done = run_core(*shlex.split(command)[1:])
    if done.returncode == 2 and "cannot be reached" in done.stderr:
        pytest.skip(f"no package index: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()


@pytest.mark.parametrize(("document", "command"), starting("core conformance "))
def test_conformance_command_as_documented(document: str, command: str) -> None:
    """The suite itself is run by the session `conformance`; here its flags are proved to exist."""
    words = shlex.split(command)[1:]
    names = [word for word in words if not word.startswith("-")][:2]
    done = run_core(*names, "--help")
    assert done.returncode == 0, done.stderr
    for word in words:
        if word.startswith("--"):
            assert word in done.stdout, word


@pytest.mark.parametrize("document", ["README.md", "docs/offline.md", "docs/serving.md", "docs/models.md"])
def test_python_blocks_run(document: str, tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = [block for block in blocks(REPO_ROOT / document) if block.language == "python"]
    assert found, f"{document} has no Python block"
    for block in found:
        done = _run_python(_tiny(block.text, document, tiny_model, request), tmp_path)
        assert done.returncode == 0, f"{block.place}:\n{done.stderr}"
        assert done.stdout.strip() or "print" not in block.text


def _tiny(code: str, document: str, model: Path, request: pytest.FixtureRequest) -> str:
    """The block with the tiny model, few tokens, the device of these tests and a real server."""
    if document == "docs/serving.md":
        return _at(request.getfixturevalue("server"), code).replace("stream=True,", "stream=True, max_tokens=8,")
    code = code.replace('pull("smollm2-135m-instruct")', f"resolve_model({str(model)!r})")
    code = code.replace('"smollm2-135m-instruct"', repr(str(model))).replace('device="cpu"', "device=DEVICE")
    code = code.replace(f"LLM({str(model)!r})", f"LLM({str(model)!r}, device=DEVICE)")
    return f"DEVICE = {default_device()!r}\n{code.replace('max_tokens=32', 'max_tokens=8')}"


def _run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    python = command_line()[0]
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=240, check=False, cwd=cwd, env=environment()
    )

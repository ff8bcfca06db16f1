"""Names to files, and pulling from a hub: a stand-in on this machine speaks the few routes that a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from core.errors import ModelLoadError, ModelNotFoundError
from core.loader import cache_home, pull, resolve_model

COMMIT = "1f" * 20


class StandInHub(ThreadingHTTPServer):
    """Serves models from memory.

    Attributes:
        repos: Files of each model.
        refusals: Status and error code for models that are not handed out.
        requests: Paths asked for.
        cut: Bytes after which a file's body ends early; None never.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.requests: list[str] = []
        self.cut: int | None = None


class HubHandler(BaseHTTPRequestHandler):
    server: StandInHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(path)
        if not path.startswith("/api/models/"):
            return self.answer_file(path)
        repo = "/".join(path.split("/")[3:5])
        if repo in self.server.refusals or repo not in self.server.repos:
            return self.refuse(*self.server.refusals.get(repo, (404, "RepoNotFound")))
        if "/revision/" in path and not path.endswith(("/main", COMMIT)):
            return self.refuse(404, "RevisionNotFound")
        files = self.server.repos[repo]
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": digest(data)} for name, data in files.items()
            ]
            return self.send(json.dumps(tree).encode())
        siblings = [{"rfilename": name} for name in files]
        return self.send(json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": []}).encode())

    def answer_file(self, path: str) -> None:
        repo, _, rest = path[1:].partition("/resolve/")
        data = self.server.repos.get(repo, {}).get(rest.partition("/")[2])
        if data is None:
            return self.refuse(404, "EntryNotFound")
        return self.send(data, self.server.cut)

    def send(self, data: bytes, cut: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{digest(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:cut])

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[StandInHub]:
    server = StandInHub()
    server.repos["org/tiny"] = {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"pickle",
    }
    server.repos["org/quantized"] = {"a.Q4_0.gguf": b"a", "b-00001-of-00002.gguf": b"1", "b-00002-of-00002.gguf": b"2"}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("CORE_HOME", str(tmp_path / "home"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_pull_fetches_what_is_needed_and_resolve_then_works_without_the_hub(hub):
    with pytest.raises(ModelNotFoundError, match="run `core pull org/tiny`"):
        resolve_model("org/tiny")
    folder = pull("org/tiny")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    asked = len(hub.requests)
    assert resolve_model("org/tiny") == folder
    assert resolve_model("org/tiny", COMMIT) == folder
    assert len(hub.requests) == asked


def test_pulling_again_fetches_no_file_twice(hub):
    folder = pull("org/tiny")
    before = [path for path in hub.requests if "model.safetensors" in path]
    assert pull("org/tiny") == folder
    assert [path for path in hub.requests if "model.safetensors" in path] == before


def test_one_gguf_file_of_a_model_with_many(hub):
    path = pull("org/quantized/a.Q4_0.gguf")
    assert path.read_bytes() == b"a"
    assert [file.name for file in path.parent.iterdir()] == ["a.Q4_0.gguf"]
    assert resolve_model("org/quantized/a.Q4_0.gguf") == path


def test_all_pieces_of_a_split_gguf_come_together(hub):
    path = pull("org/quantized/b-00001-of-00002.gguf")
    assert sorted(file.name for file in path.parent.iterdir()) == ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("name", "revision", "refusal", "message"),
    [
        ("org/absent", None, None, "the hub has no model 'org/absent'"),
        ("org/tiny", "v9", None, "org/tiny has no revision 'v9'"),
        ("org/gated", None, (403, "GatedRepo"), "org/gated is gated: accept its terms"),
        ("org/quantized/c.gguf", None, None, "org/quantized has no file c.gguf"),
        ("org/broken", None, (500, "Oops"), "org/broken cannot be downloaded.*check the connection and HF_ENDPOINT"),
    ],
)
def test_what_a_hub_refuses_is_said_in_the_users_words(hub, name, revision, refusal, message):
    if refusal is not None:
        hub.refusals[name] = refusal
    with pytest.raises(ModelNotFoundError, match=message):
        pull(name, revision=revision)


def test_model_without_safetensors_asks_for_a_file(hub):
    hub.repos["org/quantized"]["config.json"] = b"{}"
    with pytest.raises(ModelLoadError, match=r"core pull org/quantized/FILE\.gguf"):
        pull("org/quantized")


def test_unreachable_hub(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match="org/tiny cannot be downloaded"):
        pull("org/tiny")


@pytest.mark.parametrize(
    "name", ["no-such-model", "a/b/c", "./nowhere", "models/x.gguf", "x/y.gguf/z", "", "org/na me"]
)
def test_names_that_nobody_knows_list_those_that_are_known(hub, name):
    for find in (resolve_model, pull):
        with pytest.raises(ModelNotFoundError, match=r"there is no model .*org/name.*smollm2-135m-instruct"):
            find(name)


def test_paths_are_taken_as_they_are(tmp_path, monkeypatch):
    file = tmp_path / "x.gguf"
    file.touch()
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == tmp_path


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("CORE_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    monkeypatch.delenv("CORE_HOME")
    assert cache_home().parts[-2:] == (".cache", "core-inference")

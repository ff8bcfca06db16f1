"""Packages of vendors that are broken, too new, or in each other's way: listed with their error, harmless to others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from core_process import default_device, run_core
from tiny import make_tiny
from vendor_package import BACKEND_SOURCE, path_env, plugin_source, write_package

BROKEN = {"vendor-raising", "vendor-future", "vendor-twin-a", "vendor-twin-b", "vendor-unknown-hook", "vendor-no-class"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One package that works and six that do not."""
    path = tmp_path_factory.mktemp("vendors")
    works = {"plugin.py": plugin_source("plain", "vendor_plain.backend:PlainBackend"), "backend.py": BACKEND_SOURCE}
    write_package(path, "vendor-plain", "vendor_plain", works)
    write_package(path, "vendor-raising", "vendor_raising", {"plugin.py": "raise OSError('libchip.so.9 is missing')\n"})
    future = plugin_source("future", "vendor_future.backend:PlainBackend", api=(2, 0, 0))
    write_package(path, "vendor-future", "vendor_future", {"plugin.py": future, "backend.py": BACKEND_SOURCE})
    for letter in "ab":
        module = f"vendor_twin_{letter}"
        twin = {"plugin.py": plugin_source("twin", f"{module}.backend:PlainBackend"), "backend.py": BACKEND_SOURCE}
        write_package(path, f"vendor-twin-{letter}", module, twin)
    typo = plugin_source("typo", "x:y", more="@hookimpl\ndef core_backendz():\n    return []\n")
    write_package(path, "vendor-unknown-hook", "vendor_unknown_hook", {"plugin.py": typo})
    missing = plugin_source("hollow", "vendor_no_class.backend:NoSuchBackend")
    write_package(path, "vendor-no-class", "vendor_no_class", {"plugin.py": missing, "backend.py": BACKEND_SOURCE})
    return path


@pytest.fixture(scope="module")
def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """What `core backends --json` says, by distribution."""
    done = run_core("backends", "--json", env=path_env(folder))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return {item["package"].partition(" ")[0]: item for item in json.loads(done.stdout)}


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("vendor-raising", ["OSError", "libchip.so.9 is missing"]),
        ("vendor-future", ["2", "1"]),
        ("vendor-twin-a", ["'twin'", "vendor-twin-a 1.0", "vendor-twin-b 1.0"]),
        ("vendor-twin-b", ["'twin'", "vendor-twin-a 1.0", "vendor-twin-b 1.0"]),
        ("vendor-unknown-hook", ["core_backendz"]),
        ("vendor-no-class", ["NoSuchBackend"]),
    ],
)
def test_what_is_broken_is_listed_with_its_reason(
    listed: dict[str, dict[str, Any]], package: str, words: list[str]
) -> None:
    for word in words:
        assert word in listed[package]["error"]
    assert listed[package]["devices"] == []


def test_what_works_still_does(listed: dict[str, dict[str, Any]]) -> None:
    working = {name: item for name, item in listed.items() if name not in BROKEN}
    assert {"vendor-plain", f"core-backend-{default_device()}"} <= working.keys()
    for name in ("vendor-plain", f"core-backend-{default_device()}"):
        assert working[name]["error"] is None
        assert working[name]["devices"]


def test_the_table_says_the_same(folder: Path) -> None:
    done = run_core("backends", env=path_env(folder))
    assert done.returncode == 0, done.stderr
    for words in (("vendor-raising", "libchip.so.9"), ("plain", "ok"), ("vendor-twin-a", "uninstall all but one")):
        assert any(all(word in line for word in words) for line in done.stdout.splitlines()), words


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("future", ["contract", "vendor-future"]),
        ("twin", ["vendor-twin-a", "vendor-twin-b", "uninstall"]),
        ("vendor_raising", ["'vendor_raising'", "libchip.so.9 is missing"]),
        ("hollow", ["NoSuchBackend", "buy one"]),
    ],
)
def test_a_broken_device_asked_for_is_one_clear_line(
    folder: Path, tmp_path: Path, device: str, words: list[str]
) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "tiny")
    done = run_core("generate", str(model), "--prompt", "x", "--device", device, env=path_env(folder))
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def test_a_package_may_bring_a_model(tmp_path: Path) -> None:
    """`core_models`: an architecture that the core does not know, served by a class of the package."""
    announce = """
    @hookimpl
    def core_models():
        return [ModelEntry(architecture="NovelForCausalLM", load="vendor_novel.model:Novel")]
    """
    files = {
        "plugin.py": plugin_source("novel", "vendor_novel.backend:PlainBackend", more=announce),
        "backend.py": BACKEND_SOURCE,
        "model.py": "from core.models.llama import LlamaForCausalLM\n\n\nclass Novel(LlamaForCausalLM):\n    pass\n",
    }
    write_package(tmp_path / "site", "vendor-novel", "vendor_novel", files)
    model = make_tiny("LlamaForCausalLM", tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NovelForCausalLM"]}), encoding="utf-8")
    args = ("generate", str(model), "--prompt", "x", "--max-tokens", "2", "--ignore-eos", "--device", "novel", "--json")
    without = run_core(*args[:-3], "--device", default_device())
    assert without.returncode == 2
    assert "NovelForCausalLM" in without.stderr
    done = run_core(*args, env=path_env(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["outputs"][0]["token_ids"]) == 2

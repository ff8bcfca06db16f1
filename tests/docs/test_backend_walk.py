"""docs/writing-a-backend.md, walked by a vendor who types what it says and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from core_process import run_core
from markdown_blocks import REPO_ROOT, Block, blocks, commands
from tiny import make_tiny
from vendor_package import path_env

PAGE = REPO_ROOT / "docs" / "writing-a-backend.md"

KERNEL = """

def acme_rms_norm(x, weight, eps, offset):
    CALLS.append(x.shape)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (weight.float() + offset)).to(x.dtype)


CALLS = []
"""
"""The vendor's kernel, which the page leaves to the reader."""


def the_block(language: str, holds: str) -> Block:
    [found] = [block for block in blocks(PAGE) if block.language == language and holds in block.text]
    return found


def install(folder: Path, backend: str) -> dict[str, str]:
    """Writes the package of the page, installs it with pip into a folder of its own, and gives its environment."""
    source = folder / "acme"
    package = source / "core_acme"
    package.mkdir(parents=True)
    (source / "pyproject.toml").write_text(the_block("toml", "core.backends").text, encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "plugin.py").write_text(the_block("python", "def core_backends").text, encoding="utf-8")
    (package / "backend.py").write_text(backend, encoding="utf-8")
    site = folder / "site"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return path_env(site)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("walk") / "tiny")


@pytest.fixture(scope="module")
def first_day(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment after step 2: four methods, no kernel."""
    return install(tmp_path_factory.mktemp("step2"), the_block("python", "class AcmeBackend").text)


@pytest.fixture(scope="module")
def first_kernel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment after step 3: the two methods of that step in place of those of step 2."""
    methods = textwrap.indent(textwrap.dedent(the_block("python", "acme_rms_norm").text), "    ")
    before = the_block("python", "class AcmeBackend").text.partition("    def supports")[0]
    return install(tmp_path_factory.mktemp("step3"), before + methods + KERNEL)


def kinds(env: dict[str, str], model: Path) -> dict[str, set[str]]:
    done = run_core("doctor", "--model", str(model), "--device", "acme", "--json", env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, set[str]] = {}
    for row in json.loads(done.stdout)["operations"]:
        found.setdefault(row["operation"], set()).add(row["kind"])
    return found


def ids(env: dict[str, str], model: Path) -> list[int]:
    args = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--json", "--dtype", "float32")
    done = run_core("generate", str(model), "--prompt", "Acme", "--device", "acme", *args, env=env)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)["outputs"][0]["token_ids"]
    return found


def test_the_page_has_the_commands_that_are_walked_here() -> None:
    found = [command for block in blocks(PAGE) for command in commands(block)]
    assert found == [
        "core backends",
        "core doctor --model smollm2-135m-instruct --device acme",
        "core conformance run --backend acme --level L3",
    ]


def test_it_is_listed_with_what_the_page_announces(first_day: dict[str, str]) -> None:
    done = run_core("backends", "--json", env=first_day)
    assert done.returncode == 0, done.stderr
    [acme] = [item for item in json.loads(done.stdout) if item["name"] == "acme"]
    assert (acme["vendor"], acme["error"], acme["priority"]) == ("Acme", None, 10)
    assert [device["arch"] for device in acme["devices"]] == ["acme-1"]


def test_four_methods_serve_a_model_with_everything_composite(first_day: dict[str, str], tiny_model: Path) -> None:
    assert set().union(*kinds(first_day, tiny_model).values()) == {"COMPOSITE"}
    assert len(ids(first_day, tiny_model)) == 6


def test_the_first_kernel_is_used_and_changes_no_answer(
    first_day: dict[str, str], first_kernel: dict[str, str], tiny_model: Path
) -> None:
    found = kinds(first_kernel, tiny_model)
    assert "NATIVE" in found.pop("rms_norm")
    assert set().union(*found.values()) == {"COMPOSITE"}
    assert ids(first_kernel, tiny_model) == ids(first_day, tiny_model)

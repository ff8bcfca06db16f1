"""A vendor who has never seen this repository: wheels alone, in an environment of their own.

The packages are built outside of the tree and installed into a fresh virtual environment. torch and everything else
that is not ours is borrowed from the environment of the tests, to spare gigabytes. `CORE_DOWNSTREAM=full`, which the
session `downstream` sets, adds the commands of docs/writing-a-backend.md that take minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from acme_package import change, scaffold

REPO_ROOT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("CORE_DOWNSTREAM") == "full"
only_full = pytest.mark.skipif(not FULL, reason="takes minutes; `nox -s downstream` runs it")
OURS = re.compile(r"_+editable_.*|core([_.-].*)?|.*\.pth")
"""What is not borrowed: this project's packages in every form that pip leaves them in, and paths to elsewhere."""
SOURCES = {"core-inference": ("core", "pyproject.toml", "README.md", "LICENSE"), "core-conformance": ("conformance",)}


@dataclass(frozen=True)
class Vendor:
    """The vendor's machine.

    Args:
        home: Where the vendor works; the package is in it.
        python: The interpreter of the virtual environment.
    """

    home: Path
    python: Path

    def run(self, command: str, timeout: float = 3600.0) -> subprocess.CompletedProcess[str]:
        """Types a command, with the programs of the virtual environment and nothing of this repository."""
        program, *args = command.split()
        words = [str(self.python.with_name(program)), *args]
        if program == "pytest":  # it is borrowed, and has no script here
            words = [str(self.python), "-m", program, *args]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CORE_"))}
        return subprocess.run(
            words, cwd=self.home, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def says(self, command: str) -> str:
        """Types a command that must end well."""
        done = self.run(command)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        return done.stdout

    def install(self, wheel: Path) -> None:
        """Installs a wheel in place of an older one; the environment has no pip of its own."""
        options = ("--quiet", "--no-deps", "--no-index", "--force-reinstall", "--disable-pip-version-check")
        pip(f"--python={self.python}", "install", *options, str(wheel))


def pip(*args: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def build_wheel(source: Path, into: Path) -> Path:
    """Builds from a copy: building leaves files behind."""
    copy = shutil.copytree(source, into / f"{source.name}-source")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    pip("wheel", *options, "--wheel-dir", str(into / copy.name / "dist"), str(copy))
    [wheel] = (into / copy.name / "dist").glob("*.whl")
    return wheel


def borrow(site: Path, shared: Path) -> None:
    """A folder of links to everything in `site` that is not ours; `.pth` files in it are not followed."""
    shared.mkdir()
    for entry in site.iterdir():
        if not OURS.fullmatch(entry.name):
            (shared / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    """A fresh environment with core and suite from their wheels, and the scaffolded package from its own."""
    home = tmp_path_factory.mktemp("vendor")
    borrow(Path(sysconfig.get_path("purelib")), home / "shared")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    [site] = (home / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(f"{home / 'shared'}\n", encoding="utf-8")
    found = Vendor(home, home / "venv" / "bin" / "python")
    for name, parts in SOURCES.items():
        found.install(build_wheel(copy_of(home / name, parts), home))
    found.install(build_wheel(scaffold(home), home))
    return found


def copy_of(folder: Path, parts: tuple[str, ...]) -> Path:
    """Sources of one distribution, and nothing that building or running left beside them."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    if len(parts) == 1:
        return Path(shutil.copytree(REPO_ROOT / parts[0], folder, ignore=ignore))
    folder.mkdir()
    for part in parts:
        source = REPO_ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=ignore)
        else:
            shutil.copy(source, folder / part)
    return folder


WHENCE = """
import json, sys, importlib, importlib.metadata
names = ("core", "core_conformance", "core_acme")
files = {name: importlib.import_module(name).__file__ for name in names}
backends = sorted(entry.name for entry in importlib.metadata.entry_points(group="core.backends"))
finders = [str(finder) for finder in sys.meta_path if "editable" in str(finder).lower()]
print(json.dumps({"path": sys.path, "files": files, "backends": backends, "finders": finders}))
"""


def test_our_packages_come_from_wheels_alone(vendor: Vendor) -> None:
    (vendor.home / "whence.py").write_text(WHENCE, encoding="utf-8")
    found = json.loads(vendor.says("python whence.py"))
    assert found["finders"] == []
    assert [place for place in found["path"] if Path(place).is_relative_to(REPO_ROOT)] == []
    for file in found["files"].values():
        assert Path(file).is_relative_to(vendor.home / "venv"), file
    assert found["backends"] == ["acme"]


def test_a_deliberate_bug_is_named(vendor: Vendor) -> None:
    """Attention that skips the last key: the message has operation, first wrong index and kind of fault."""
    package = change(vendor.home / "core-backend-acme", vendor.home / "buggy", {"kernels.py": SKIPS_THE_LAST_KEY})
    vendor.install(build_wheel(package, vendor.home))
    try:
        done = vendor.run("core conformance run --backend acme --level L1 -k attention/counting-full-fp32")
    finally:
        vendor.install(next((vendor.home / "core-backend-acme-source" / "dist").glob("*.whl")))
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert re.search(
        r"L1/attention/counting-full-fp32: attention\(dtype=float32, .*?\): [^:]*\[\d+, \d+, \d+\] is ", line
    ), line
    assert "likely tail: the newest key of each query is left out" in line


SKIPS_THE_LAST_KEY = '''"""An attention that sees each key but the newest."""

from collections.abc import Callable
from typing import Any

import torch
from core.backend.ops import AttentionArgs, AttentionOp, OpSpec
from torch import Tensor


class Attention:
    def __init__(self, op: AttentionOp) -> None:
        self.op = op

    def __call__(self, args: AttentionArgs) -> Tensor:
        op, plan = self.op, args.plan
        keys, values = args.cache
        out = torch.zeros(*args.query.shape[:2], op.v_head_dim, dtype=args.query.dtype)
        starts, repeat = plan.query_start_loc.tolist(), op.num_heads // op.num_kv_heads
        for request, length in enumerate(plan.seq_lens.tolist()):
            blocks = plan.block_table[request, : -(-length // plan.block_size)].long()
            tokens = slice(starts[request], starts[request + 1])
            query = args.query[tokens].float()
            planes = (plane[blocks].flatten(0, 1)[:length].float() for plane in (keys, values))
            key, value = (plane.repeat_interleave(repeat, dim=1) for plane in planes)
            position = torch.arange(length - len(query), length)[:, None]
            seen = torch.arange(length) < position.clamp(min=1)  # <= position is right
            scores = torch.einsum("qhd,khd->hqk", query, key) * op.scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
            out[tokens] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
        return out


KERNELS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {"attention": Attention}


def refusal(op: OpSpec) -> str:
    plain = isinstance(op, AttentionOp) and op.causal and not (op.features or op.window or op.softcap)
    return "" if plain else "no kernel yet"
'''


@only_full
@pytest.mark.timeout(3600)
def test_the_walk_ends_with_a_certificate(vendor: Vendor) -> None:
    """The commands of the page that take minutes, as they stand there; `pip install` was done by the fixture."""
    said = vendor.says(
        "core conformance run --backend acme --level L3 --report-dir first --certify first/certificate.json"
    )
    print(said)
    assert "certified acme L3" in said
    print(vendor.says("core conformance verify first/certificate.json"))
    vendor.says("core conformance report first/report.json --html matrix.html")
    assert "core-backend-acme" in (vendor.home / "matrix.html").read_text(encoding="utf-8")


@only_full
@pytest.mark.timeout(3600)
def test_the_packages_own_tests_pass(vendor: Vendor) -> None:
    said = vendor.says("pytest core-backend-acme")
    assert "4 passed" in said


@only_full
@pytest.mark.timeout(600)
def test_the_first_certificate_takes_few_lines(vendor: Vendor) -> None:
    found = json.loads(vendor.says("core conformance next --backend acme --json"))
    print(f"lines of the vendor's package: {found['vendor_lines']}; write next: {found['next']}")
    assert 0 < found["vendor_lines"] <= 60

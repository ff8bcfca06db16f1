"""Two contracts side by side: a copy of this core that is one minor ahead, and packages built for either."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[3]
if str(REPO_ROOT / "tests/docs") not in sys.path:
    sys.path.append(str(REPO_ROOT / "tests/docs"))

from vendor_package import plugin_source, write_package  # noqa: E402

from core.spec import CONTRACT_VERSION  # noqa: E402

__all__ = ["MAJOR", "MINOR", "Runner", "write_newer_core", "write_packages"]

Runner = Callable[..., subprocess.CompletedProcess[str]]
MAJOR, MINOR = CONTRACT_VERSION

BACKEND = """
import os

import torch

from core.backend import Backend, UnsupportedError, Verdict
from core.backend.ops import OpSpec
from core.spec import Capabilities, DeviceInfo

NATIVE = ("act_mul", "rms_norm")


class AcmeBackend(Backend):
    def probe(self):
        return [DeviceInfo(index=0, arch="acme-1", memory_bytes=2**30, sdk="1.0", simulated=True)]

    def open(self, index, config):
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(block_sizes=(16,))

    def supports(self, op, device):
        with open(os.environ["ACME_ASKED"], "a") as log:
            log.write(op.describe() + "\\n")
        return Verdict.native() if op.name in NATIVE and not op.features else Verdict.composite("no kernel")

    def bind(self, op):
        if op.name == "act_mul" and not op.features:
            return lambda args: self._act_mul(op, args.x)
        if op.name == "rms_norm" and not op.features:
            return lambda args: self._rms_norm(op, args)
        raise UnsupportedError(op.describe(), "no kernel")

    def _act_mul(self, op, x):
        gate, up = x.float().split(op.size, dim=-1)
        activate = {
            "silu": torch.nn.functional.silu,
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
        }[op.activation]
        return (activate(gate) * up).to(x.dtype)

    def _rms_norm(self, op, args):
        x = args.x.float()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + op.eps)
        return (normed * (args.weight.float() + op.weight_offset)).to(args.x.dtype)
"""
"""A backend with two kernels, built for this contract; it writes down what it is asked."""


def write_newer_core(folder: Path) -> None:
    """A copy of `core` whose contract has one minor more, and in `act_mul` a parameter and a feature."""
    shutil.copytree(REPO_ROOT / "core", folder / "core", ignore=shutil.ignore_patterns("__pycache__"))
    _change(
        folder / "core/spec.py", f"CONTRACT_VERSION = ({MAJOR}, {MINOR})", f"CONTRACT_VERSION = ({MAJOR}, {MINOR + 1})"
    )
    dense = folder / "core/backend/ops/dense.py"
    _change(dense, "import Args, OpSpec, optional", "import Args, OpSpec, optional, since")
    _change(
        dense,
        'activation: Activation = "silu"\n\n\n',
        f'activation: Activation = "silu"\n    limit: float = since({MINOR + 1}, 0.0)\n\n\n',
    )
    _change(
        dense,
        'gate in the first half, read-only.\n    """\n\n    x: Tensor\n',
        'gate in the first half, read-only.\n    """\n\n    x: Tensor\n'
        f'    bias: Tensor | None = optional("gate_bias", minor={MINOR + 1})\n',
    )


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path.name} holds {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new), encoding="utf-8")


def write_packages(folder: Path) -> None:
    """Installed packages: of this contract, of the next minor, and of the majors before and behind."""
    apis = {
        "acme": (MAJOR, 0, MINOR),
        "eager": (MAJOR, MINOR + 1, MINOR + 1),
        "elder": (MAJOR - 1, 0, 4),
        "younger": (MAJOR + 1, 0, 2),
    }
    for name, api in apis.items():
        plugin = plugin_source(name, f"vendor_{name}.backend:AcmeBackend", api=api)
        write_package(folder, f"vendor-{name}", f"vendor_{name}", {"plugin.py": plugin, "backend.py": BACKEND})

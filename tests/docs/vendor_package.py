"""Packages of vendors that exist for one test: written to a folder that a child process has on its path."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path

__all__ = ["BACKEND_SOURCE", "path_env", "plugin_source", "write_package"]

BACKEND_SOURCE = """
import torch

from core.backend import Backend, UnsupportedError, Verdict
from core.spec import Capabilities, DeviceInfo


class PlainBackend(Backend):
    def probe(self):
        return [DeviceInfo(index=0, arch="plain-1", memory_bytes=2**30, sdk="1.0")]

    def open(self, index, config):
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(block_sizes=(16,))

    def supports(self, op, device):
        return Verdict.composite("no kernel")

    def bind(self, op):
        raise UnsupportedError(op.describe(), "no kernel")
"""
"""A backend that works: everything is COMPOSITE."""


def plugin_source(name: str, load: str, api: tuple[int, int, int] = (1, 0, 0), more: str = "") -> str:
    """A plugin module that announces one backend."""
    return f"""
import pluggy

from core.spec import BackendInfo, ModelEntry

hookimpl = pluggy.HookimplMarker("core")


@hookimpl
def core_backends():
    return [BackendInfo(name={name!r}, vendor="Test", api={api!r}, load={load!r}, priority=-5, remedy="buy one")]

{textwrap.dedent(more)}
"""


def write_package(folder: Path, distribution: str, module: str, files: Mapping[str, str]) -> None:
    """An installed distribution with one import package and the entry point `{module}.plugin`, as pip leaves it."""
    package = folder / module
    package.mkdir(parents=True)
    for name, source in {"__init__.py": "", **files}.items():
        (package / name).write_text(source, encoding="utf-8")
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[core.backends]\n{module} = {module}.plugin\n", encoding="utf-8")


def path_env(*folders: Path) -> dict[str, str]:
    """Environment in which the folders come first on Python's path."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])}

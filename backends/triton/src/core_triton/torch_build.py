"""For which platform torch was built, read from its files: importing it takes seconds and may start a driver."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TorchBuild", "torch_build"]


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """What `torch.version` says.

    Args:
        version: Of torch; empty where it is not installed.
        cuda: CUDA version that it was built for; empty for none.
        hip: HIP version that it was built for; empty for none.
    """

    version: str = ""
    cuda: str = ""
    hip: str = ""


def torch_build() -> TorchBuild:
    """The installed torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild()
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return TorchBuild()
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= ['\"]([^'\"]*)['\"]", text, re.MULTILINE))
    return TorchBuild(version=found.get("__version__", ""), cuda=found.get("cuda", ""), hip=found.get("hip", ""))

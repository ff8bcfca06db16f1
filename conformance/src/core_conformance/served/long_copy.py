"""The copy model as L4 serves it: with room for answers that are long enough to be left in the middle."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

from core_conformance.engines.models import model_folder

__all__ = ["LONG_POSITIONS", "served_copy_folder"]

LONG_POSITIONS = 8192
"""Longest sequence. Its rotary angles know no limit; the number in config.json is one that nobody exceeds at L3."""


@functools.cache
def served_copy_folder() -> Path:
    """The copy model's folder, beside that of L3, with `LONG_POSITIONS`; gone with it."""
    source = model_folder("copy")
    folder = source.with_name("copy-served")
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = LONG_POSITIONS
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder

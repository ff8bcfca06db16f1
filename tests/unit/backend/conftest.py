"""Puts the bare backend and the paged-cache builder within reach of the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test draws the same numbers, on one thread, in inference mode as the engine runs operations."""
    torch.set_num_threads(1)
    torch.manual_seed(20)
    with torch.inference_mode():
        yield

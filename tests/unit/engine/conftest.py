"""Puts the stub runner and the fixtures around it within reach of the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(autouse=True)
def _bounded(request: pytest.FixtureRequest) -> None:
    """No test of an engine may hang: each has 30 seconds."""
    request.node.add_marker(pytest.mark.timeout(30))

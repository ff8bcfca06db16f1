"""Tests that run in the environment with torch_npu, on a simulated NPU. `tests/backend/ascend` starts them there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

INSIDE = "CORE_ASCEND_SIMULATE" in os.environ
collect_ignore_glob = [] if INSIDE else ["test_*.py"]


@pytest.fixture(scope="session")
def subject() -> Iterator[object]:
    """The simulated 910B as the conformance suite sees it."""
    from core_conformance.subject import Subject
    from core_conformance.target import load_target

    target = load_target("ascend")
    yield Subject(target)
    target.close()

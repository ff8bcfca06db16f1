"""The one door to torch_npu, which this package imports at no other place, and not before a device is opened."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["FRACTAL_NZ", "PLAIN", "npu"]

FRACTAL_NZ = 29
"""ACL's number of the fractal format in which the matrix unit reads weights."""
PLAIN = 2
"""ACL's number of the plain format."""


def npu() -> Any:
    """The module torch_npu. It has no types."""
    return importlib.import_module("torch_npu")

"""How a test of the suite gets its stable id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

__all__ = ["MARK", "check"]

MARK = "conformance"
"""Name of the mark that carries the id."""

Test = TypeVar("Test", bound=Callable[..., Any])


def check(
    name: str, variants: Mapping[str, Any] | Iterable[str] | None = None, *, mandatory: bool = False
) -> Callable[[Test], Test]:
    """Makes a test function a check.

    Args:
        name: The id, "L1/rms_norm"; with variants the head of the ids.
        variants: Tail of each id to the value that the test gets as `variant` (a name is its own value).
        mandatory: Whether a backend may not decline it: UNSUPPORTED is then a FAIL.
    """

    def decorate(test: Test) -> Test:
        marked: Test = pytest.mark.conformance(name, mandatory=mandatory)(test)
        if variants is None:
            return marked
        pairs = variants.items() if isinstance(variants, Mapping) else [(tail, tail) for tail in variants]
        values = [pytest.param(value, id=tail) for tail, value in pairs]
        varied: Test = pytest.mark.parametrize("variant", values)(marked)
        return varied

    return decorate

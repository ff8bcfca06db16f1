"""Every hook is described where it is specified, in the documents, and used by a test."""

from __future__ import annotations

import inspect

import pytest
from markdown_blocks import REPO_ROOT, documents

from core import hookspecs

HOOKS = [name for name, value in inspect.getmembers(hookspecs, inspect.isfunction) if hasattr(value, "core_spec")]


def test_the_hooks_are_found() -> None:
    assert {"core_backends", "core_models", "core_conformance_cases"} <= set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented(hook: str) -> None:
    assert len((getattr(hookspecs, hook).__doc__ or "").strip()) > 20
    texts = [path.read_text(encoding="utf-8") for path in documents(REPO_ROOT) if "adr" not in path.parts]
    assert any(hook in text for text in texts), f"no document says what {hook} is for"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_used(hook: str) -> None:
    places = ("tests", "backends", "conformance")
    sources = [path for place in places for path in (REPO_ROOT / place).rglob("*.py") if path.name != "test_hooks.py"]
    assert any(hook in path.read_text(encoding="utf-8") for path in sources), f"no test and no package uses {hook}"

"""Every public case whose parts exist is named by the test that covers it."""

from __future__ import annotations

import json
import re

import pytest
from markdown_blocks import REPO_ROOT

CASES = REPO_ROOT.parent / "shared" / "cases" / "serving.jsonl"
KINDS = {
    *("detok", "stop_eos", "finish_choices", "logprobs", "limits_inputs", "sampling", "injection", "template"),
    *("lifecycle", "scheduling", "cache", "loading", "model_math", "backend", "http_api"),
}
"""Kinds whose parts exist; the others (tool calls, reasoning, grammars) come with theirs."""


def wanted() -> list[str]:
    if not CASES.is_file():
        return []
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    return [case["id"] for case in cases if case["kind"] in KINDS]


def named() -> set[str]:
    """Ids in the docstrings of tests, this file left out."""
    found: set[str] = set()
    for place in ("tests", "conformance", "backends"):
        for path in (REPO_ROOT / place).rglob("*.py"):
            if path.name != "test_cases.py":
                found |= set(re.findall(r"\bH\d{3}\b", path.read_text(encoding="utf-8")))
    return found


@pytest.mark.skipif(not CASES.is_file(), reason="the public cases are not beside this clone")
def test_every_case_is_named_by_a_test() -> None:
    assert len(wanted()) > 30
    assert sorted(set(wanted()) - named()) == []

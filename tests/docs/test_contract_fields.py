"""What a vendor fills in is described: every field of the records that a backend gives to the core."""

from __future__ import annotations

import dataclasses
import re

import pytest
from markdown_blocks import REPO_ROOT, documents

from core.backend import Verdict
from core.spec import BackendInfo, Capabilities, DeviceInfo, ModelEntry

RECORDS = (BackendInfo, Capabilities, DeviceInfo, ModelEntry, Verdict)


def fields() -> list[tuple[type, str]]:
    return [(record, field.name) for record in RECORDS for field in dataclasses.fields(record)]


@pytest.mark.parametrize(("record", "field"), fields(), ids=lambda value: getattr(value, "__name__", value))
def test_every_field_is_described_at_its_record(record: type, field: str) -> None:
    """In the `Args` of the class, or by a string after the field."""
    source = (record.__doc__ or "") + _strings_after_fields(record)
    assert re.search(rf"\b{field}\b", source), f"{record.__name__}.{field} is not described"


def _strings_after_fields(record: type) -> str:
    module = REPO_ROOT / (record.__module__.replace(".", "/") + ".py")
    text = module.read_text(encoding="utf-8")
    return "\n".join(re.findall(r'^    (\w+): [^\n]*\n    """', text, re.MULTILINE))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Capabilities)])
def test_every_capability_is_in_the_documents(field: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in documents(REPO_ROOT) if "adr" not in path.parts]
    assert any(re.search(rf"\b{field}\b", text) for text in texts), f"no document names the capability {field}"

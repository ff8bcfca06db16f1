"""JSON Schemas of what the suite writes, shipped beside this file, and what a document breaks of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

__all__ = ["CERTIFICATE_SCHEMA", "REPORT_SCHEMA", "SCHEMA_VERSION", "schema_errors"]

SCHEMA_VERSION = 1
"""Of report.json; raised when a reader of the earlier version would misread it."""
REPORT_SCHEMA = "report.schema.json"
CERTIFICATE_SCHEMA = "certificate.schema.json"


def schema_errors(document: Any, name: str) -> list[str]:
    """What a document breaks of a schema, "place: message" each, the worst first; empty where it fits."""
    found = sorted(_validator(name).iter_errors(document), key=jsonschema.exceptions.relevance, reverse=True)
    return [f"{error.json_path}: {error.message[:300]}" for error in found]


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    schema: Mapping[str, Any] = json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)

"""Checks a certificate again: nothing that it or its report says of itself is believed where it can be found out."""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core_conformance.report.certificate import make_statement
from core_conformance.report.document import Report
from core_conformance.report.facts import suite_hash
from core_conformance.report.files import REPORT_FILE
from core_conformance.report.judgement import objections
from core_conformance.report.provenance import Package, inspect_package
from core_conformance.report.schemas import CERTIFICATE_SCHEMA, schema_errors

__all__ = ["Finding", "Verdict", "verify_certificate"]

_PAYLOAD_TYPE = "application/vnd.in-toto+json"


class Verdict(enum.StrEnum):
    """What came of one check of a certificate."""

    OK = "OK"
    FAIL = "FAIL"
    NOT_CHECKED = "NOT CHECKED"
    """It cannot be found out here."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check of a certificate.

    Args:
        verdict: What came of it.
        text: What was checked, and why it failed.
    """

    verdict: Verdict
    text: str


def verify_certificate(certificate: Path, report: Path | None = None) -> list[Finding]:
    """Every check in order; one FAIL makes the certificate worthless.

    Args:
        certificate: The statement, or a DSSE envelope around it.
        report: Its `report.json`; beside the certificate by default.

    Raises:
        ConfigError: the certificate cannot be read.
    """
    statement, standing = _read_statement(certificate)
    errors = schema_errors(statement, CERTIFICATE_SCHEMA)
    if errors:
        return [Finding(verdict=Verdict.FAIL, text=f"statement: {errors[0]}")]
    found = [Finding(verdict=Verdict.OK, text="statement: in-toto Statement v1 with a test-result"), standing]
    place = report or certificate.with_name(REPORT_FILE)
    try:
        content = place.read_bytes()
    except OSError as error:
        return [*found, _fail(f"report: {place} cannot be read ({error.strerror}); give it with --report")]
    digests = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    if hashlib.sha256(content).hexdigest() != digests[REPORT_FILE]:
        return [*found, _fail(f"report: {place.name} is not the one that was certified; it was edited or replaced")]
    found.append(Finding(verdict=Verdict.OK, text=f"report: {place.name} has the certified hash"))
    try:
        parsed = Report.from_document(json.loads(content))
    except (ValueError, KeyError, TypeError) as error:
        return [*found, _fail(f"report: {error}")]
    return [*found, *_packages(parsed, digests), _suite(parsed), *_outcome(parsed, statement, content)]


def _read_statement(path: Path) -> tuple[Any, Finding]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document, dict) and document.get("payloadType") == _PAYLOAD_TYPE:
            signers = ", ".join(str(each.get("keyid") or "no key id") for each in document["signatures"])
            payload = json.loads(base64.b64decode(document["payload"], validate=True))
            text = f"signature: of {signers}, which the signer's own tool must check"
            return payload, Finding(verdict=Verdict.NOT_CHECKED, text=text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ConfigError(
            f"certificate {path} cannot be read ({error}); give a file that `core conformance run --certify` wrote"
        ) from error
    return document, Finding(verdict=Verdict.NOT_CHECKED, text="signature: none, self-reported")


def _packages(report: Report, digests: dict[str, str]) -> Iterator[Finding]:
    """The certified packages beside those installed here."""
    modules = {"core-inference": "core", "core-conformance": "core_conformance"}
    for name, package in report.facts.packages.items():
        if digests.get(name) != package.digest:
            yield _fail(f"package {name}: certificate and report name different contents")
            continue
        here = inspect_package(name, modules.get(name, package.module))
        yield _package(package, here)


def _package(then: Package, here: Package) -> Finding:
    if here.source == "none":
        text = f"package {then.name} {then.version}: not installed here; install it to compare its content"
        return Finding(verdict=Verdict.NOT_CHECKED, text=text)
    if here.version != then.version:
        text = f"package {then.name} {then.version}: {here.version} is installed here; install the other to compare"
        return Finding(verdict=Verdict.NOT_CHECKED, text=text)
    if here.digest != then.digest:
        return _fail(f"package {then.name} {then.version}: its content here is not what was certified; reinstall it")
    return Finding(verdict=Verdict.OK, text=f"package {then.name} {then.version}: same content here")


def _suite(report: Report) -> Finding:
    """Without the very same suite nobody can say which ids a level has."""
    wanted, here = report.facts.suite_hash, suite_hash()
    if wanted != here:
        version = report.facts.suite.version
        return _fail(
            f"suite: it was {wanted[:12]}, here it is {here[:12]}; install core-conformance {version} unchanged"
        )
    return Finding(verdict=Verdict.OK, text=f"suite: same files and lists ({here[:12]})")


def _outcome(report: Report, statement: dict[str, Any], content: bytes) -> Iterator[Finding]:
    """The level from the records, and the statement that follows from them."""
    found = objections(report)
    for reason in found:
        yield _fail(f"outcome: {reason}")
    if found:
        return
    made = make_statement(report, content)
    for name in ("subject", "predicate"):
        if made[name] != statement[name]:
            yield _fail(f"outcome: the {name} is not what follows from the report's records")
            return
    level, mode = report.level_reached, report.facts.mode
    yield Finding(verdict=Verdict.OK, text=f"outcome: {report.facts.backend} {level} ({mode}), from the records")


def _fail(text: str) -> Finding:
    return Finding(verdict=Verdict.FAIL, text=text)

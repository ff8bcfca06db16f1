"""JUnit XML, which every CI system shows: one suite a report and level, one case a record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from core_conformance.records import Outcome, Record, level_of
from core_conformance.report.document import Report

__all__ = ["to_junit"]

_TAGS = {Outcome.FAIL: "failure", Outcome.ERROR: "error", Outcome.NOT_RUN: "skipped", Outcome.UNSUPPORTED: "skipped"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(reports: Sequence[Report]) -> str:
    """The XML text. UNSUPPORTED and NOT_RUN are skipped cases with their reason; of a WAIVED one the waiver is told."""
    root = ET.Element("testsuites", name="core-conformance")
    for report in reports:
        names = dict.fromkeys(level_of(record.id) for record in report.records)
        for name in names:
            _add_suite(root, report, name, [record for record in report.records if level_of(record.id) == name])
        if report.problems:
            _add_problems(root, report)
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_suite(root: ET.Element, report: Report, name: str, records: Sequence[Record]) -> None:
    tags = [_TAGS.get(record.outcome) for record in records]
    suite = ET.SubElement(
        root,
        "testsuite",
        name=f"{report.facts.backend}/{name}",
        tests=str(len(records)),
        failures=str(tags.count("failure")),
        errors=str(tags.count("error")),
        skipped=str(tags.count("skipped")),
        time=f"{sum(record.seconds for record in records):.3f}",
        timestamp=report.facts.date[:19],
        hostname=report.facts.machine,
    )
    for record, tag in zip(records, tags, strict=True):
        name = record.id.rpartition("/")[0].replace("/", ".")
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"{report.facts.backend}.{name}",
            name=record.id,
            time=f"{record.seconds:.3f}",
        )
        text = _NOT_XML.sub("?", record.reason)
        if tag is not None:
            ET.SubElement(case, tag, message=text, type=str(record.outcome))
        if record.ratio is not None:
            properties = ET.SubElement(case, "properties")
            ET.SubElement(properties, "property", name="err/bound", value=f"{record.ratio:.4g}")
        if record.outcome is Outcome.WAIVED:
            ET.SubElement(case, "system-out").text = text


def _add_problems(root: ET.Element, report: Report) -> None:
    count = str(len(report.problems))
    suite = ET.SubElement(
        root, "testsuite", name=f"{report.facts.backend}/run", tests=count, failures="0", errors=count, skipped="0"
    )
    for number, problem in enumerate(report.problems, 1):
        case = ET.SubElement(suite, "testcase", classname=f"{report.facts.backend}.run", name=f"problem {number}")
        ET.SubElement(case, "error", message=_NOT_XML.sub("?", problem), type="ERROR")

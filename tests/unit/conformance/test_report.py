"""Reports: one document with a schema, and what is made of it for people and machines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from core.errors import ConfigError
from core_conformance.records import Mode, Outcome, Record
from core_conformance.report.badge import to_badge
from core_conformance.report.document import Report, read_report
from core_conformance.report.files import write_report_files
from core_conformance.report.html import to_html
from core_conformance.report.junit import to_junit
from core_conformance.report.markdown import matrix_markdown, summary_markdown
from core_conformance.report.matrix import OPERATIONS, Cell, Matrix, build_matrix
from core_conformance.report.trend import compare_reports, trends_since

SCHEMA = Path(__file__).parents[3] / "conformance/src/core_conformance/report/report.schema.json"


def cell(matrix: Matrix, row: str, column: int = 0) -> Cell:
    return matrix.cells[row, matrix.columns[column]]


def test_a_written_report_fits_its_schema_and_comes_back_as_it_was(make_report: Any, tmp_path: Path) -> None:
    odd = {"err": math.inf, "bound": 0.5, "ratio": math.inf, "outcome": Outcome.FAIL, "notes": {"worst": math.nan}}
    report = make_report("L0", "L1", change={"L1/rms_norm/small-bf16": odd})
    content = write_report_files(report, tmp_path / "new" / "folder")
    document = json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(document)
    assert {path.name for path in (tmp_path / "new/folder").iterdir()} == {"report.json", "junit.xml", "summary.md"}
    again = read_report(tmp_path / "new/folder/report.json")
    assert again.to_json().encode() == content and again.facts == report.facts
    assert next(r for r in again.records if r.outcome is Outcome.FAIL).ratio == math.inf


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d.pop("records"), "records"),
        (lambda d: d["schema"].update(version=2), "schema.version"),
        (lambda d: d["records"][0].update(outcome="FINE"), "outcome"),
        (lambda d: d["records"][0].update(ratio="small"), "ratio"),
        (lambda d: d["run"].update(suite_hash="1234"), "suite_hash"),
        (lambda d: d["records"].append(dict(d["records"][0])), "more than one record"),
    ],
)
def test_what_is_no_report_is_refused_with_the_place(
    make_report: Any, tmp_path: Path, spoil: Any, message: str
) -> None:
    document = make_report("L0").to_document()
    spoil(document)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_report(path)


def test_a_file_that_is_not_json_or_not_there_is_refused_with_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("not json", encoding="utf-8")
    for name in ("x", "y"):
        with pytest.raises(ConfigError, match=r"give a report\.json"):
            read_report(tmp_path / name)


@pytest.mark.parametrize(
    ("levels", "change", "reached"),
    [
        (("L0", "L1", "L2"), {}, "L2"),
        (("L0", "L1", "L2"), {"L1/rms_norm/small-fp16": {"outcome": Outcome.FAIL}}, "L0"),
        (("L0", "L1"), {"L0/probe-cheap": {"outcome": Outcome.NOT_RUN}}, ""),
        (("L1", "L2"), {}, ""),
        (("L0", "L1"), {"L1/rms_norm/small-fp16": {"outcome": Outcome.UNSUPPORTED}}, "L1"),
    ],
)
def test_the_level_is_the_highest_with_all_below_it_complete(
    make_report: Any, levels: tuple[str, ...], change: dict[str, Any], reached: str
) -> None:
    assert make_report(*levels, change=change).level_reached == reached
    assert make_report(*levels, change=change, problems=["a file was not collected"]).level_reached == ""


def test_junit_has_a_case_for_each_record_with_its_reason(make_report: Any) -> None:
    change = {
        "L0/probe-cheap": {"outcome": Outcome.FAIL, "reason": "took 3 s <& \x00"},
        "L0/copy-blocks": {"outcome": Outcome.UNSUPPORTED, "reason": "no copies"},
        "L0/memory": {"outcome": Outcome.ERROR, "reason": "a raw skip"},
    }
    report = make_report("L0", change=change, problems=["a plugin was loaded"])
    root = ET.fromstring(to_junit([report]))
    assert int(root.attrib["tests"]) == len(report.records) + 1
    assert (root.attrib["failures"], root.attrib["errors"], root.attrib["skipped"]) == ("1", "2", "1")
    cases = {case.attrib["name"]: case for case in root.iter("testcase")}
    failure = cases["L0/probe-cheap"].find("failure")
    assert failure is not None and failure.attrib["message"] == "took 3 s <& ?"
    assert cases["L0/copy-blocks"].find("skipped") is not None


def test_the_matrix_says_of_each_model_what_was_shown(make_report: Any) -> None:
    device = make_report(change={"L3/abort/llama": {"outcome": Outcome.FAIL, "reason": "a block leaked"}})
    simulated = make_report(mode=Mode.SIMULATED, device="acme-sim")
    compiled = make_report("L0", "L1", mode=Mode.COMPILED, device="acme-2")
    matrix = build_matrix([device, simulated, compiled])
    assert matrix.rows == (OPERATIONS, "copy", "gemma3", "llama")
    assert [column.arch for column in matrix.columns] == ["acme-1", "acme-2", "acme-sim"]
    told = {(row, column.arch): (c.word, c.level) for (row, column), c in matrix.cells.items()}
    assert told["llama", "acme-1"] == ("VALIDATED", "L2") and told["gemma3", "acme-1"] == ("VALIDATED", "L3")
    assert told["llama", "acme-sim"] == ("SIMULATED", "L3")
    assert told[OPERATIONS, "acme-2"] == ("COMPILED", "L1") and told["llama", "acme-2"] == ("UNTESTED", "")
    assert cell(matrix, "gemma3").operations == {"attention": "NATIVE", "rms_norm": "COMPOSITE"}
    assert [record.id for record in cell(matrix, "llama").failures] == ["L3/abort/llama"]


def test_the_strongest_evidence_counts_then_the_newest(make_report: Any) -> None:
    old = make_report("L0", date="2029-01-01T00:00:00+00:00")
    new = make_report("L0", "L1", date="2031-01-01T00:00:00+00:00")
    later = make_report("L0", "L1", mode=Mode.COMPILED, date="2032-01-01T00:00:00+00:00")
    found = cell(build_matrix([old, later, new]), OPERATIONS)
    assert found.word == "VALIDATED" and found.report is new and found.level == "L1"


def test_reports_of_different_suites_are_said_to_be_that(make_report: Any) -> None:
    reports = [make_report("L0"), make_report("L0", suite_hash="0" * 64, device="acme-2")]
    assert "2 versions of the suite" in matrix_markdown(build_matrix(reports))
    assert "2 versions of the suite" in to_html(build_matrix(reports))
    assert "versions of the suite" not in matrix_markdown(build_matrix(reports[:1]))


def test_one_record_of_weaker_evidence_makes_the_whole_pair_weaker(make_report: Any) -> None:
    found = cell(build_matrix([make_report("L0", change={"L0/copy-blocks": {"mode": Mode.COMPILED}})]), OPERATIONS)
    assert found.word == "COMPILED"


def test_a_pair_without_a_complete_level_is_failed_and_a_refused_model_unsupported(make_report: Any) -> None:
    broken = make_report("L0", change={"L0/probe-cheap": {"outcome": Outcome.FAIL}})
    assert cell(build_matrix([broken]), OPERATIONS).word == "FAILED"
    refused = make_report()
    mine = {r.id: {"outcome": Outcome.UNSUPPORTED} for r in refused.records if r.model == "gemma3"}
    assert cell(build_matrix([make_report(change=mine)]), "gemma3").word == "UNSUPPORTED"


def test_markdown_names_levels_failures_versions_and_standing(make_report: Any) -> None:
    change = {"L1/rms_norm/small-fp16": {"outcome": Outcome.FAIL, "reason": "a | b\nc"}}
    report = make_report("L0", "L1", change=change)
    text = summary_markdown(report)
    for part in ("# acme: L0 VALIDATED", "**not complete**", "a \\| b c", "Acme One", "self-reported", "contract 1."):
        assert part in text, part
    table = matrix_markdown(build_matrix([report]))
    assert "| operations | VALIDATED L0, 1 failed, err/bound 0.50 |" in table


@pytest.mark.parametrize(
    ("mode", "change", "message", "color"),
    [
        (Mode.VALIDATED, {}, "L1 VALIDATED", "brightgreen"),
        (Mode.SIMULATED, {}, "L1 SIMULATED", "blue"),
        (Mode.COMPILED, {}, "L1 COMPILED", "yellow"),
        (Mode.VALIDATED, {"L0/probe-cheap": {"outcome": Outcome.FAIL}}, "FAILED", "red"),
    ],
)
def test_the_badge_has_the_fields_of_a_shields_endpoint(
    make_report: Any, mode: Mode, change: dict[str, Any], message: str, color: str
) -> None:
    badge = json.loads(to_badge(build_matrix([make_report("L0", "L1", mode=mode, change=change)])))
    assert badge["schemaVersion"] == 1 and badge["label"] == "conformance acme"
    assert (badge["message"], badge["color"]) == (message, color)


def _pair(make_report: Any) -> tuple[Report, Report]:
    old = make_report(
        "L0",
        "L1",
        change={
            "L0/memory": {"outcome": Outcome.FAIL},
            "L0/copy-blocks": {"outcome": Outcome.NOT_RUN},
            "L1/rms_norm/small-fp16": {"ratio": 0.5},
        },
    )
    new = make_report(
        "L0",
        "L1",
        change={
            "L1/rms_norm/small-fp16": {"ratio": 0.9},
            "L1/rms_norm/small-bf16": {"ratio": 0.2},
            "L1/rms_norm/small-fp32": {"ratio": 0.505},
            "L1/sample/greedy": {"outcome": Outcome.FAIL, "ratio": 3.0, "reason": "token 4"},
            "L0/probe-cheap": None,
        },
    )
    return old, new


def test_the_trend_tells_what_moved_broke_mended_came_and_went(make_report: Any) -> None:
    trend = compare_reports(*_pair(make_report))
    assert [(m.id, m.before, m.after) for m in trend.nearer] == [
        ("L1/sample/greedy", 0.5, 3.0),
        ("L1/rms_norm/small-fp16", 0.5, 0.9),
    ]
    assert [m.id for m in trend.farther] == ["L1/rms_norm/small-bf16"], "a hundredth of the bound is noise"
    assert [r.id for r in trend.failures] == ["L1/sample/greedy"] and trend.mended == ("L0/memory",)
    assert trend.came == ("L0/copy-blocks",) and trend.went == ("L0/probe-cheap",)
    text = matrix_markdown(build_matrix([trend.new]), [trend])
    for part in (
        "New failures: 1",
        "Nearer to their bound: 2",
        "| `L1/rms_norm/small-fp16` | 0.500 | 0.900 |",
        "Went: 1",
    ):
        assert part in text, part


def test_a_trend_is_only_of_the_same_backend_and_device(make_report: Any) -> None:
    old, new = _pair(make_report)
    assert len(trends_since([new], [old])) == 1
    assert not trends_since([make_report("L0", device="acme-2")], [old])
    assert compare_reports(new, new).still


def test_a_record_keeps_fields_of_a_later_suite_out() -> None:
    record = Record(id="L0/x", outcome=Outcome.PASS)
    assert Record.from_dict({**record.to_dict(), "colour": "blue"}) == record

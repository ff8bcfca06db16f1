"""Certificates: when one is given, what it holds, and that verifying believes nothing which it can find out."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from core.errors import ConfigError
from core_conformance.cli import app
from core_conformance.must_pass_lists import must_pass
from core_conformance.records import Mode, Outcome
from core_conformance.report import certificate
from core_conformance.report.certificate import RefusedError, write_certificate
from core_conformance.report.document import Report
from core_conformance.report.files import write_report_files
from core_conformance.report.provenance import Package
from core_conformance.report.verify import Verdict, verify_certificate
from core_conformance.waivers import Waiver

Spoil = Callable[[dict[str, Any]], Any]
TODAY = datetime.date.today()


def certify(report: Report, folder: Path) -> Path:
    write_certificate(report, write_report_files(report, folder), folder / "certificate.json")
    return folder / "certificate.json"


def failed(path: Path, report: Path | None = None) -> list[str]:
    return [finding.text for finding in verify_certificate(path, report) if finding.verdict is Verdict.FAIL]


def waiver(days: int) -> Waiver:
    expires = TODAY + datetime.timedelta(days=days)
    return Waiver(ids=("L1/*",), backend="acme", hardware="acme-1", url="https://example.org/7", expires=expires)


def test_a_certificate_is_a_statement_over_packages_and_report(make_report: Any, tmp_path: Path) -> None:
    report = make_report("L0", "L1", change={"L0/copy-blocks": {"outcome": Outcome.UNSUPPORTED}})
    path = certify(report, tmp_path)
    statement = json.loads(path.read_text(encoding="utf-8"))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert {each["name"] for each in statement["subject"]} == {"core-inference", "core-conformance", "report.json"}
    predicate = statement["predicate"]
    assert predicate["result"] == "PASSED" and predicate["passedTests"] == sorted(must_pass(["L0", "L1"]))
    [suite] = predicate["configuration"]
    assert suite["annotations"]["level"] == "L1" and suite["annotations"]["unsupported"] == ["L0/copy-blocks"]
    assert failed(path) == []
    told = [finding.text for finding in verify_certificate(path)]
    assert "signature: none, self-reported" in told
    assert "outcome: acme L1 (VALIDATED), from the records" in told


def test_the_level_is_that_of_the_run_and_no_higher(make_report: Any, tmp_path: Path) -> None:
    path = certify(make_report(mode=Mode.SIMULATED), tmp_path)
    annotations = json.loads(path.read_text(encoding="utf-8"))["predicate"]["configuration"][0]["annotations"]
    assert annotations["level"] == "L3" and annotations["mode"] == "SIMULATED"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"change": {"L1/rms_norm/small-fp16": {"outcome": Outcome.FAIL}}},
            "not run or not acceptable: L1/rms_norm/small-fp16",
        ),
        ({"change": {"L0/memory": {"outcome": Outcome.NOT_RUN}}}, "not run or not acceptable: L0/memory"),
        ({"change": {"L0/memory": None}}, "missing from the report: L0/memory"),
        ({"change": {"L0/invented": {}}}, "not in the must-pass lists of this suite: L0/invented"),
        ({"change": {"L0/mandatory-core": {"outcome": Outcome.UNSUPPORTED}}}, "no backend may say"),
        ({"change": {"L1/rms_norm/small-fp16": {"ratio": 1.5}}}, "called PASS with err/bound 1.5"),
        ({"change": {"L1/rms_norm/small-fp16": {"ratio": float("nan")}}}, "called PASS with err/bound nan"),
        ({"change": {"L1/rms_norm/small-fp16": {"outcome": Outcome.WAIVED}}}, "no waiver of the report covers it"),
        ({"change": {"L0/memory": {"mode": Mode.COMPILED}}}, "COMPILED says that nothing ran"),
        ({"change": {"L0/memory": {"mode": Mode.SIMULATED}}}, "the report says otherwise"),
        ({"selection": "attention"}, "only a part was asked for"),
        ({"shard": "1/2"}, "only a part was asked for"),
        ({"problems": ["a file was not collected"]}, "a file was not collected"),
    ],
)
def test_no_certificate_is_given_and_an_old_one_goes(
    make_report: Any, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    (tmp_path / "certificate.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RefusedError, match=why):
        certify(make_report("L0", "L1", **options), tmp_path)
    assert not (tmp_path / "certificate.json").exists()


def test_levels_with_a_gap_and_a_compiled_run_carry_none(make_report: Any, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="do not begin at L0 without a gap"):
        certify(make_report("L0", "L2"), tmp_path)
    with pytest.raises(RefusedError, match="COMPILED"):
        certify(make_report("L0", "L1", mode=Mode.COMPILED), tmp_path)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dirty": True}, "uncommitted changes"),
        ({"edited": ("core_conformance/suite/test_l1_linear.py",)}, "was edited after it was installed"),
        ({"source": "files"}, "neither installed from a wheel nor in a git checkout"),
        ({"source": "none"}, "no distribution brings"),
    ],
)
@pytest.mark.parametrize("which", ["core", "suite", "package"])
def test_packages_that_nobody_can_vouch_for_carry_none(
    make_report: Any, tmp_path: Path, which: str, fields: dict[str, Any], why: str
) -> None:
    report = make_report("L0")
    changed = dataclasses.replace(getattr(report.facts, which), name=f"of-{which}", **fields)
    report.facts = dataclasses.replace(report.facts, **{which: changed})
    with pytest.raises(RefusedError, match=why):
        certify(report, tmp_path)


def test_a_waived_failure_is_a_warning_until_its_waiver_expires(make_report: Any, tmp_path: Path) -> None:
    change = {"L1/rms_norm/small-fp16": {"outcome": Outcome.WAIVED, "reason": "waived"}}
    path = certify(make_report("L0", "L1", change=change, waivers=(waiver(1),)), tmp_path)
    predicate = json.loads(path.read_text(encoding="utf-8"))["predicate"]
    assert (
        predicate["result"] == "WARNED"
        and predicate["warnedTests"] == ["L1/rms_norm/small-fp16"]
        and failed(path) == []
    )
    with pytest.raises(RefusedError, match="the waiver of L1/rms_norm/small-fp16 expired"):
        certify(make_report("L0", "L1", change=change, waivers=(waiver(-1),)), tmp_path)


def _rewrite(path: Path, spoil: Spoil) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    spoil(document)
    path.write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda s: s.update(predicateType="https://example.org/x"), "statement: $.predicateType"),
        (lambda s: s["predicate"].pop("passedTests"), "statement: $.predicate"),
        (lambda s: s["predicate"]["configuration"][0]["annotations"].update(level="L3"), "the predicate is not what"),
        (lambda s: s["predicate"]["configuration"][0]["annotations"].update(mode="SIMULATED"), "the predicate is not"),
        (lambda s: s["predicate"]["passedTests"].append("L9/invented"), "the predicate is not what"),
        (lambda s: s["subject"][0]["digest"].update(sha256="0" * 64), "name different contents"),
        (lambda s: s["subject"][0]["annotations"].update(version="9.9"), "the subject is not what"),
        (lambda s: s["subject"][-1]["digest"].update(sha256="0" * 64), "edited or replaced"),
    ],
)
def test_an_edited_certificate_fails(make_report: Any, tmp_path: Path, spoil: Spoil, why: str) -> None:
    path = certify(make_report("L0", "L1"), tmp_path)
    _rewrite(path, spoil)
    assert any(why in text for text in failed(path)), failed(path)


def test_packages_and_suite_must_be_those_that_are_installed(make_report: Any, tmp_path: Path) -> None:
    report = make_report("L0")
    other = dataclasses.replace(report.facts.core, digest="1" * 64)
    report.facts = dataclasses.replace(report.facts, core=other, package=other, suite_hash="2" * 64)
    texts = failed(certify(report, tmp_path))
    assert any("package core-inference" in text and "not what was certified" in text for text in texts)
    assert any(text.startswith("suite: it was 222222222222") for text in texts)


def test_a_package_that_is_not_here_is_told_and_not_believed(make_report: Any, tmp_path: Path) -> None:
    report = make_report("L0")
    absent = dataclasses.replace(report.facts.core, name="core-backend-nosuch", module="core_nosuch", version="7")
    older = dataclasses.replace(report.facts.core, version="0.0.1")
    report.facts = dataclasses.replace(report.facts, core=older, package=absent)
    told = {f.text: f.verdict for f in verify_certificate(certify(report, tmp_path))}
    missing = "package core-backend-nosuch 7: not installed here; install it to compare its content"
    assert told[missing] is Verdict.NOT_CHECKED
    assert any("package core-inference 0.0.1:" in t and v is Verdict.NOT_CHECKED for t, v in told.items())


def test_an_envelope_is_opened_and_its_signers_named(make_report: Any, tmp_path: Path) -> None:
    path = certify(make_report("L0"), tmp_path)
    payload = base64.b64encode(path.read_bytes()).decode()
    envelope = {
        "payloadType": "application/vnd.in-toto+json",
        "payload": payload,
        "signatures": [{"keyid": "acme-release", "sig": "AAAA"}],
    }
    path.write_text(json.dumps(envelope), encoding="utf-8")
    findings = verify_certificate(path)
    assert [f.text for f in findings if f.verdict is Verdict.NOT_CHECKED] == [
        "signature: of acme-release, which the signer's own tool must check"
    ]
    assert failed(path) == []


def test_what_is_no_certificate_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[", encoding="utf-8")
    with pytest.raises(ConfigError, match="--certify"):
        verify_certificate(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]", encoding="utf-8")
    assert failed(tmp_path / "x.json")[0].startswith("statement: ")


def test_the_command_prints_each_finding_and_its_exit_code(make_report: Any, tmp_path: Path) -> None:
    path = certify(make_report("L0"), tmp_path)
    good = CliRunner().invoke(app, ["verify", str(path)])
    assert good.exit_code == 0 and "OK          outcome: acme L0 (VALIDATED), from the records" in good.output
    (tmp_path / "report.json").rename(tmp_path / "elsewhere.json")
    gone = CliRunner().invoke(app, ["verify", str(path)])
    assert gone.exit_code == 1 and "give it with --report" in gone.output
    assert CliRunner().invoke(app, ["verify", str(path), "--report", str(tmp_path / "elsewhere.json")]).exit_code == 0


def test_a_certificate_is_about_a_report_of_everything(tmp_path: Path) -> None:
    asked = ["run", "--backend", "reference", "--level", "L0", "--certify", str(tmp_path / "c.json")]
    result = CliRunner().invoke(app, asked)
    assert isinstance(result.exception, ConfigError) and "--report-dir" in str(result.exception)
    result = CliRunner().invoke(app, [*asked, "--report-dir", str(tmp_path), "-k", "memory"])
    assert isinstance(result.exception, RefusedError) and "leaves checks out" in str(result.exception)
    assert not (tmp_path / "report.json").exists(), "it is refused before anything runs"


def test_a_dirty_tree_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = certificate.inspect_package

    def with_a_change(name: str, module: str) -> Package:
        return dataclasses.replace(honest(name, module), source="checkout", revision="0" * 40, dirty=True, edited=())

    monkeypatch.setattr(certificate, "inspect_package", with_a_change)
    asked = ["run", "--backend", "reference", "--level", "L0", "--certify", str(tmp_path / "c.json")]
    result = CliRunner().invoke(app, [*asked, "--report-dir", str(tmp_path)])
    assert isinstance(result.exception, RefusedError) and result.exception.exit_code == 2
    assert "the checkout of core-inference has uncommitted changes; commit them" in str(result.exception)
    assert not (tmp_path / "report.json").exists()

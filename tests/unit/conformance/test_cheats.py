"""Ways to look better than one is, each planted, each caught: by a run of the suite, by --certify or by verify."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core_conformance import Outcome, Report, Target, load_target, run_suite
from core_conformance.bare import INFO, BareBackend
from core_conformance.report.certificate import write_certificate
from core_conformance.report.files import write_report_files
from core_conformance.report.provenance import Package, inspect_package
from core_conformance.report.verify import Verdict, verify_certificate

HEAD = "import pytest\nfrom core_conformance.checks import check\n"
FAILING = "@check('L0/a')\ndef test_a():\n    assert False, 'the truth'\n"
PASSING = "@check('L0/a')\ndef test_a():\n    pass\n"
NUMBERS = itertools.count()


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / f"cheated_{next(NUMBERS)}"
    folder.mkdir()
    yield folder
    for name in [name for name in sys.modules if folder.name in name or name in ("lenient", "rerunner")]:
        del sys.modules[name]


def run(suite: Path, source: str, **options: Any) -> Report:
    (suite / f"test_l0_{suite.name}.py").write_text(HEAD + source, encoding="utf-8")
    return run_suite(load_target("reference"), ["L0"], suite=suite, expected=["L0/a"], **options)


def only(report: Report) -> tuple[Outcome, str]:
    [record] = report.records
    return record.outcome, record.reason


def test_a_conftest_that_turns_failures_into_passes_is_not_read(suite: Path) -> None:
    hook = "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n    return True\n"
    for folder in (suite, suite.parent):
        (folder / "conftest.py").write_text(hook, encoding="utf-8")
    outcome, reason = only(run(suite, FAILING))
    assert outcome is Outcome.FAIL and "the truth" in reason


def test_a_conftest_that_deselects_a_check_is_not_read(suite: Path) -> None:
    hook = "def pytest_collection_modifyitems(items):\n    items.clear()\n"
    (suite / "conftest.py").write_text(hook, encoding="utf-8")
    assert only(run(suite, FAILING))[0] is Outcome.FAIL


@pytest.mark.parametrize("option", ["--deselect=test_l0_x.py", "-k nothing", "-p lenient", "--collect-only"])
def test_options_of_the_environment_do_not_reach_the_suite(
    suite: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", option)
    monkeypatch.setenv("PYTEST_PLUGINS", "lenient")
    monkeypatch.syspath_prepend(str(suite))
    (suite / "lenient.py").write_text("def pytest_pyfunc_call(pyfuncitem):\n    return True\n", encoding="utf-8")
    assert only(run(suite, FAILING))[0] is Outcome.FAIL
    assert os.environ["PYTEST_ADDOPTS"] == option, "the caller's own pytest keeps its options"


def test_a_module_put_in_place_of_a_suite_file_is_an_error(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = run(suite, PASSING)
    assert honest.ok
    [name] = [name for name in sys.modules if name.endswith(f"test_l0_{suite.name}")]
    fake = types.ModuleType(name)
    exec(compile(HEAD + PASSING, "vendor.py", "exec"), fake.__dict__)
    monkeypatch.setitem(sys.modules, name, fake)
    outcome, reason = only(run(suite, FAILING))
    assert outcome is Outcome.ERROR and "its code is not the suite's" in reason


def test_a_check_redefined_from_elsewhere_is_an_error(suite: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "lenient.py").write_text(HEAD + PASSING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    outcome, reason = only(run(suite, f"{FAILING}\nfrom lenient import test_a\n"))
    assert outcome is Outcome.ERROR and "lenient.py" in reason


RERUNNER = """
from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item, nextitem):
    runtestprotocol(item, nextitem=nextitem, log=True)
    runtestprotocol(item, nextitem=nextitem, log=True)
    return True
"""


@pytest.mark.parametrize("source", [PASSING, FAILING])
def test_a_rerun_plugin_is_told_and_its_second_try_does_not_count(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "rerunner.py").write_text(RERUNNER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    report = run(suite, f"pytest_plugins = ['rerunner']\n{source}")
    assert not report.ok and any("pytest plugin rerunner" in problem for problem in report.problems)
    outcome, reason = only(report)
    assert outcome is (Outcome.ERROR if source is PASSING else Outcome.FAIL)
    assert "ran twice" in reason or "the truth" in reason


@pytest.mark.parametrize(
    "body",
    [
        "@check('L0/a')\ndef test_a():\n    pytest.skip('not today')\n",
        "@check('L0/a')\n@pytest.mark.xfail(reason='known')\ndef test_a():\n    assert False\n",
        "@check('L0/a')\n@pytest.mark.flaky(reruns=3)\ndef test_a():\n    pass\n",
    ],
    ids=["raw-skip", "xfail", "flaky"],
)
def test_a_raw_skip_xfail_or_rerun_mark_is_an_error(suite: Path, body: str) -> None:
    report = run(suite, body)
    assert not report.ok and not report.complete("L0")
    assert all(record.outcome is Outcome.ERROR for record in report.records)


def test_a_missing_id_is_an_error(suite: Path) -> None:
    assert only(run(suite, "")) == (Outcome.ERROR, "it is in the must-pass list and was not collected")


def test_a_doubled_id_is_an_error(suite: Path) -> None:
    assert only(run(suite, PASSING + PASSING.replace("test_a", "test_b"))) == (Outcome.ERROR, "two checks have this id")


def test_a_check_that_says_by_itself_that_it_is_optional_is_an_error() -> None:
    from core_conformance.plugin import SuitePlugin
    from core_conformance.run import SUITE

    plugin = SuitePlugin(load_target("reference"), suite=SUITE)
    plugin.collected, plugin.mandatory = ["L0/a", "L0/b"], ["L0/b"]
    plugin.expect(["L0/a", "L0/b"], ["L0/a"])
    assert {name: record.outcome for name, record in plugin.records.items()} == {
        "L0/a": Outcome.ERROR,
        "L0/b": Outcome.ERROR,
    }


class Stale(BareBackend):
    """Says that it has no kernel, and has one."""

    def bind(self, op: Any) -> Callable[..., Any]:
        from core.backend.reference import COMPOSITES

        made: Callable[..., Any] = COMPOSITES[op.name](op)
        return made


def test_a_stale_declaration_is_a_failure() -> None:
    wanted = "L0/declared-unsupported-raises"
    report = run_suite(Target(info=INFO, make=Stale), ["L0"], select=lambda check_id: check_id == wanted)
    [record] = report.failures
    assert record.id == wanted and "the declaration is stale" in record.reason


def test_a_report_edited_after_the_fact_does_not_verify(make_report: Any, tmp_path: Path) -> None:
    change = {"L0/memory": {"outcome": Outcome.PASS, "ratio": 0.5}}
    report = make_report("L0", change=change)
    certificate = tmp_path / "certificate.json"
    write_certificate(report, write_report_files(report, tmp_path), certificate)
    path = tmp_path / "report.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"ratio": 0.5', '"ratio": 0.1'), encoding="utf-8")
    [finding] = [each for each in verify_certificate(certificate) if each.verdict is Verdict.FAIL]
    assert "edited or replaced" in finding.text


def test_a_report_whose_failure_was_called_a_pass_does_not_verify_with_a_fitting_certificate(
    make_report: Any, tmp_path: Path
) -> None:
    """Whoever edits the report also makes the statement anew: the numbers of the record still say what happened."""
    from core_conformance.report.certificate import make_statement

    report = make_report("L0", "L1", change={"L1/rms_norm/small-bf16": {"outcome": Outcome.PASS, "ratio": 7.0}})
    statement = make_statement(report, write_report_files(report, tmp_path))
    (tmp_path / "certificate.json").write_text(json.dumps(statement), encoding="utf-8")
    texts = [f.text for f in verify_certificate(tmp_path / "certificate.json") if f.verdict is Verdict.FAIL]
    assert "outcome: L1/rms_norm/small-bf16 is called PASS with err/bound 7" in texts


# -- installed packages: a wheel's RECORD, and a checkout's commit ---------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A package `chip` as an installer leaves it: a module, a data file, RECORD."""
    site = tmp_path / "site"
    files = {"chip/__init__.py": "X = 1\n", "chip/must_pass/L0.txt": "L0/a\n"}
    rows = []
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
        rows.append(f"{name},sha256={_record_hash(text)},{len(text)}")
    info = site / "chip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chip\nVersion: 1.0\n", encoding="utf-8")
    rows += ["chip-1.0.dist-info/RECORD,,", "chip-1.0.dist-info/INSTALLER,,", "../../bin/chip,sha256=AAAA,3"]
    (info / "RECORD").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return site


def _record_hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def look(site: Path) -> Package:
    return inspect_package("chip", "chip", path=[str(site)])


def test_an_untouched_wheel_has_no_objection_and_one_digest_wherever_it_lies(installed: Path, tmp_path: Path) -> None:
    found = look(installed)
    assert (found.source, found.edited, found.objection) == ("wheel", (), "")
    (installed / "chip/__pycache__").mkdir()
    (installed / "chip/__pycache__/x.pyc").write_bytes(b"1")
    moved = installed.rename(tmp_path / "elsewhere")
    assert look(moved).digest == found.digest and look(moved).objection == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chip/__init__.py", "X = 2\n"),
        ("chip/must_pass/L0.txt", ""),
        ("chip/conftest.py", "# new\n"),
        ("chip/__init__.py", None),
    ],
    ids=["edited", "list-emptied", "added", "removed"],
)
def test_an_edited_added_or_removed_file_of_a_wheel_is_an_objection(
    installed: Path, name: str, text: str | None
) -> None:
    before = look(installed)
    if text is None:
        (installed / name).unlink()
    else:
        (installed / name).write_text(text, encoding="utf-8")
    after = look(installed)
    assert after.edited == (name,) and "was edited after it was installed" in after.objection
    assert after.digest != before.digest


def _git(folder: Path, *args: str) -> None:
    name = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *name, *args], check=True, capture_output=True, timeout=60)


def test_a_checkout_is_good_while_it_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, site = tmp_path / "src", tmp_path / "site"
    (source / "chip_dev").mkdir(parents=True)
    (source / "chip_dev/__init__.py").write_text("X = 1\n", encoding="utf-8")
    info = site / "chip_dev-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chip-dev\nVersion: 1.0\n", encoding="utf-8")
    (info / "RECORD").write_text("", encoding="utf-8")
    (info / "direct_url.json").write_text('{"dir_info": {"editable": true}, "url": "file:///x"}', encoding="utf-8")
    monkeypatch.syspath_prepend(str(source))

    def seen() -> Package:
        return inspect_package("chip-dev", "chip_dev", path=[str(site)])

    assert seen().source == "files" and "neither installed from a wheel nor" in seen().objection
    _git(source, "init", "-q")
    _git(source, "add", ".")
    _git(source, "commit", "-q", "-m", "one")
    clean = seen()
    assert clean.source == "checkout" and len(clean.revision) == 40 and clean.objection == ""
    (source / "chip_dev/extra.py").write_text("Y = 1\n", encoding="utf-8")
    assert "uncommitted changes" in seen().objection

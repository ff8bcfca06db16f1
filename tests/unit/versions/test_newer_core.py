"""A package built for one minor of the contract on a core that is a minor ahead, and packages of other majors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from newer_contract import MAJOR, MINOR, Runner

from core.spec import CONTRACT_VERSION
from core_conformance.records import Outcome
from core_conformance.report.document import read_report

NEWER = f"{MAJOR}.{MINOR + 1}"


def answer(python: Runner, code: str, *, newer: bool = True) -> dict[str, object]:
    """The JSON object that a script prints as its last line."""
    done = python("-c", code, newer=newer)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_copy_is_a_minor_ahead_and_this_core_is_not(python: Runner) -> None:
    code = "from core.spec import CONTRACT_VERSION as v; print('.'.join(map(str, v)))"
    assert python("-c", code).stdout.strip() == NEWER
    assert python("-c", code, newer=False).stdout.strip() == ".".join(map(str, CONTRACT_VERSION))


def test_packages_of_this_major_are_usable_and_others_are_not(python: Runner) -> None:
    code = (
        "import json; from core import plugins\n"
        "print(json.dumps({item.name: item.error for item in plugins.list_backends()}))"
    )
    newer, this = answer(python, code), answer(python, code, newer=False)
    assert newer["acme"] is None and newer["eager"] is None and this["acme"] is None
    for found, name in ((newer, "younger"), (newer, "elder"), (this, "eager"), (this, "younger")):
        assert f"backend {name!r}" in str(found[name]) and "contract" in str(found[name])


SUITE = """
import pathlib, sys
from core_conformance import load_target, run_suite
from core_conformance.must_pass_lists import must_pass

wanted = {i for i in must_pass(["L0", "L1"]) if i.startswith(("L0/", "L1/act_mul/", "L1/rms_norm/"))}
report = run_suite(load_target("acme"), ["L0", "L1"], select=wanted.__contains__)
report.records = [record for record in report.records if record.id in wanted]
pathlib.Path(sys.argv[1]).write_text(report.to_json())
"""


def test_an_older_package_passes_l0_and_its_kernels_l1(python: Runner, asked: Path, tmp_path: Path) -> None:
    """The suite runs on the newer core too, and asks the package about nothing that it cannot know."""
    done = python("-c", SUITE, str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stderr
    report = read_report(tmp_path / "report.json")
    assert report.facts.contract == NEWER and not report.problems
    assert not report.failures, report.summary()
    assert report.complete("L0")
    native = [record for record in report.of_level("L1") if "NATIVE" in record.kinds.values()]
    assert len(native) >= 9 and all(record.outcome is Outcome.PASS for record in native)
    lines = asked.read_text(encoding="utf-8")
    assert "act_mul(" in lines and "limit" not in lines and "gate_bias" not in lines


RESOLVE = """
import dataclasses, json
from core import plugins
from core.backend import Backend, OpenConfig
from core.backend.negotiate import Binder
from core.backend.ops import ActMulOp
from core.errors import UnsupportedError
from core.spec import DType

opened = plugins.open_device("acme", OpenConfig())
binder = Binder(opened.backend, opened.info, opened.device, block_size=16)
plain = ActMulOp(dtype=DType.FLOAT32, size=4)
newer = {
    "limit": dataclasses.replace(plain, limit=7.0),
    "gate_bias": dataclasses.replace(plain, features=frozenset({"gate_bias"})),
}
rows = {name: binder.resolve(op) for name, op in newer.items()}
found = {name: [row.kind, row.reason] for name, row in rows.items()}
try:
    binder.bind(newer["limit"])
except UnsupportedError as error:
    found["error"] = str(error)
found["plain"] = [binder.resolve(plain).kind, ""]
Backend.sleep = lambda self: "the default of a later core"
found["sleep"] = opened.backend.sleep()
print(json.dumps(found))
"""


def test_a_newer_field_or_feature_is_no_without_a_call_and_the_rest_native(python: Runner, asked: Path) -> None:
    found = answer(python, RESOLVE)
    for name in ("limit", "gate_bias"):
        kind, reason = found[name]  # type: ignore[misc]
        assert kind == "NO" and name in reason and f"contract {MAJOR}.{MINOR}" in reason, reason
    assert "limit=7.0" in str(found["error"]) and "upgrade its package" in str(found["error"])
    assert found["plain"] == ["NATIVE", ""]
    assert asked.read_text(encoding="utf-8").splitlines() == ["act_mul(dtype=float32, size=4)"]
    assert found["sleep"] == "the default of a later core", "a backend derives from the core's base"


RUN = ("-m", "core.cli", "conformance", "run", "--level", "L0", "--backend")
DOCTOR = ("-m", "core.cli", "doctor", "--model", "none", "--device")
CHOOSE = (
    "-c",
    "import sys; from core import plugins; from core.errors import CoreError\n"
    "try: plugins.choose_device(sys.argv[1])\n"
    "except CoreError as error: sys.stderr.write(f'error: {error}'); sys.exit(error.exit_code)",
)


@pytest.mark.parametrize(
    ("command", "backend", "newer", "words"),
    [
        (
            RUN,
            "younger",
            True,
            [f"contract {MAJOR + 1}.2", NEWER, f"contract {MAJOR}.x", f"core-inference for {MAJOR + 1}.x"],
        ),
        (DOCTOR, "elder", True, [f"contract {MAJOR - 1}.4", NEWER, f"contract {MAJOR}.x"]),
        (CHOOSE, "eager", False, [f"needs contract {NEWER}", "upgrade core-inference"]),
        (CHOOSE, "younger", False, [f"contract {MAJOR + 1}.2", f"contract {MAJOR}.x"]),
    ],
)
def test_a_package_of_another_contract_is_refused_by_name(
    python: Runner, command: tuple[str, ...], backend: str, newer: bool, words: list[str], asked: Path
) -> None:
    done = python(*command, backend, newer=newer)
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = done.stderr.strip().splitlines()
    for word in ("error: ", f"'{backend}'", f"vendor-{backend}", *words):
        assert word in line
    assert "reinstall" not in line
    assert not asked.exists(), "its code ran"

"""Repeats of L3: an id with two outcomes is named, with what it said when it failed."""

from __future__ import annotations

import pytest

from core_conformance import flaky
from core_conformance.engines.chance import CHANCE_VARIABLE, chance_seed
from core_conformance.flaky import Repeats


def test_an_id_with_two_outcomes_is_named_with_its_reason() -> None:
    repeats = Repeats()
    repeats.add({"L3/a": ("PASS", ""), "L3/b": ("PASS", ""), "L3/c": ("UNSUPPORTED", "no swap")})
    repeats.add({"L3/a": ("FAIL", "token 3 is 5"), "L3/b": ("PASS", ""), "L3/c": ("UNSUPPORTED", "no swap")})
    assert repeats.findings() == ["L3/a: 1 PASS, 1 FAIL; token 3 is 5"]
    assert repeats.summary() == "1 of 3 ids end in two ways in 2 runs"


def test_an_id_that_always_fails_and_one_that_is_missing_once_are_findings() -> None:
    repeats = Repeats()
    repeats.add({"L3/a": ("FAIL", "wrong"), "L3/b": ("PASS", "")})
    repeats.add({"L3/a": ("FAIL", "wrong")})
    assert repeats.findings() == ["L3/a: 2 FAIL; wrong", "L3/b: 1 PASS, 1 missing"]


def test_the_command_fails_on_findings_and_where_nothing_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def run(backend: str, chance: int) -> dict[str, tuple[str, str]]:
        seen.append(chance)
        return {"L3/a": ("PASS" if chance != 4 else "FAIL", "odd")} if backend == "cpu" else {}

    monkeypatch.setattr(flaky, "_run", run)
    assert flaky.main(["--backend", "cpu", "--times", "2"]) == 0
    assert flaky.main(["--backend", "cpu", "--times", "2", "--first", "3"]) == 1
    assert seen == [0, 1, 3, 4] and "L3/a: 1 PASS, 1 FAIL; odd" in capsys.readouterr().out
    assert flaky.main(["--backend", "nosuch", "--times", "1"]) == 1


def test_chance_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHANCE_VARIABLE, raising=False)
    assert chance_seed() == 0
    monkeypatch.setenv(CHANCE_VARIABLE, "7")
    assert chance_seed() == 7

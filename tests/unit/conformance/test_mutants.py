"""The suite's own proof: the catalogue, what counts as a kill, the committed matrix. All of it: `nox -s mutants`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core_conformance.must_pass_lists import LEVELS, must_pass
from core_conformance.mutants import __main__ as command
from core_conformance.mutants import pool
from core_conformance.mutants.catalogue import HONEST, MUTANTS
from core_conformance.mutants.kill_matrix import check_names, check_of, read_rows, render
from core_conformance.mutants.proof import prove, prove_honest
from core_conformance.mutants.variant import Honest, Mutant, kernel_bug
from core_conformance.subject import oracle

REPO_ROOT = Path(__file__).parents[3]
LEAST_MUTANTS, LEAST_HONEST = 40, 8
QUICK = {
    "L0": "more memory free than there is",
    "L1": "rope off by one",
    "L2": "last norm left out",
    "L3": "one seed for all requests",
}
"""For each level the mutant that is killed soonest."""


def named(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def test_each_variant_is_named_once() -> None:
    names = [variant.name for variant in (*MUTANTS, *HONEST)]
    assert sorted(set(names)) == sorted(names)
    assert len(MUTANTS) >= LEAST_MUTANTS and len(HONEST) >= LEAST_HONEST


def test_each_variant_names_checks_that_exist() -> None:
    heads = {head for mutant in MUTANTS for head in (mutant.first, *mutant.also)}
    assert all(mutant.first.startswith(f"{mutant.level}/") for mutant in MUTANTS)
    heads |= {head for honest in HONEST for head in honest.heads}
    known = must_pass(LEVELS)
    assert not [head for head in sorted(heads) if not any(check_id.startswith(head) for check_id in known)]


@pytest.mark.parametrize("level", QUICK)
def test_one_mutant_of_each_level_is_killed_by_what_it_is_assigned_to(level: str) -> None:
    proof = prove(named(QUICK[level]), whole=False)
    assert proof.level == level and proof.holds, proof.line()
    assert proof.killed_by[-1].startswith(proof.first)


def test_an_honest_kernel_passes_and_is_really_run() -> None:
    honest = next(honest for honest in HONEST if honest.name == "norm's weight first")
    proof = prove_honest(dataclasses.replace(honest, heads=("L1/rms_norm",)))
    assert proof.holds and len(proof.ran) >= 12, proof.line()


def test_the_committed_matrix_names_every_variant_and_each_ended_as_it_must() -> None:
    """Made by `python -m core_conformance.mutants --matrix docs/kill-matrix.md`."""
    rows = read_rows((REPO_ROOT / "docs" / "kill-matrix.md").read_text(encoding="utf-8"))
    assert {row.name for row in rows if not row.honest} == {mutant.name for mutant in MUTANTS}
    assert {row.name for row in rows if row.honest} == {honest.name for honest in HONEST}
    assert {row.name: row.level for row in rows if not row.honest} == {m.name: m.level for m in MUTANTS}
    assert not [row.name for row in rows if not row.holds]
    assert sum(not row.honest for row in rows) >= LEAST_MUTANTS and sum(row.honest for row in rows) >= LEAST_HONEST


def test_every_check_of_the_suite_is_in_the_committed_matrix() -> None:
    page = (REPO_ROOT / "docs" / "kill-matrix.md").read_text(encoding="utf-8")
    assert not [name for name in check_names() if f"| `{name}` |" not in page]


def _raises(op: Any) -> Callable[[Any], Any]:
    def kernel(args: Any) -> Any:
        raise RuntimeError("the kernel crashed")

    return kernel


@pytest.mark.parametrize(
    ("maker", "crashes"), [(_raises, True), (oracle, False)], ids=["a crash of its own", "no bug at all"]
)
def test_what_is_no_finding_of_a_check_kills_nothing(maker: Any, crashes: bool) -> None:
    proof = prove(kernel_bug("planted", "act_mul/silu-fp32", {"act_mul": maker}))
    assert not proof.holds and not proof.killed_by and bool(proof.crashed) is crashes
    assert proof.line().startswith("SURVIVED")


def test_a_kill_by_other_checks_than_those_assigned_is_none() -> None:
    mutant = dataclasses.replace(named("the other gelu"), first="L1/act_mul/silu-fp32", also=("L1/act_mul/gelu-fp32",))
    proof = prove(mutant)
    assert proof.killed_by == ("L1/act_mul/gelu-fp32",) and not proof.holds


def test_a_rejected_honest_variant_is_told() -> None:
    bug = named("gate and up exchanged")
    proof = prove_honest(Honest(name="not honest", makers=bug.makers, heads=("L1/act_mul/silu",)))
    assert not proof.holds and proof.line().startswith("REJECTED")


def test_the_command_fails_where_a_mutant_survives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = kernel_bug("no bug at all", "act_mul/silu-fp32", {"act_mul": oracle})
    monkeypatch.setattr(command, "MUTANTS", (harmless,))
    monkeypatch.setattr(pool, "MUTANTS", (harmless,))
    assert command.main(["no bug", "--jobs", "1", "--quick"]) == 1
    assert "SURVIVED" in capsys.readouterr().out


def test_the_command_knows_no_mutant_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["there is none such"]) == 2
    assert "there is none such" in capsys.readouterr().out


def test_an_id_belongs_to_the_longest_name_that_fits() -> None:
    names = check_names()
    assert check_of("L1/attention/decode-mha-bf16", names) == "L1/attention"
    assert check_of("L1/attention/window-one-bf16", names) == "L1/attention/window"
    assert check_of("L0/memory", names) == "L0/memory"


def test_the_page_can_be_read_back() -> None:
    proofs = [prove(named("more memory free than there is"), whole=False)]
    [row] = read_rows(render(proofs, must_pass(["L0"])))
    assert (row.name, row.honest, row.level, row.holds) == ("more memory free than there is", False, "L0", True)

"""Nothing of the contract is without a check of L1, and what is added without one is named."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from core.backend.ops import OPERATIONS, Args, ReduceNormOp, RouteOp
from core.backend.schemes import SCHEMES
from core_conformance.must_pass_lists import must_pass
from core_conformance.operations.coverage import COVERAGE, gaps
from core_conformance.ownership import WRITABLE

IDS = frozenset(must_pass(["L1"]))


def test_every_operation_parameter_scheme_and_collective_has_an_id() -> None:
    assert len(OPERATIONS) >= 28
    assert gaps(OPERATIONS, SCHEMES, IDS) == []


@dataclass(frozen=True, kw_only=True)
class Newer(RouteOp):
    """An operation that grew."""

    temperature: float = 1.0


def test_an_operation_without_checks_is_named() -> None:
    found = gaps({**OPERATIONS, "fly": ReduceNormOp}, SCHEMES, IDS)
    assert found == ["operation fly has no checks: add them, and its line in operations/coverage.py"]


def test_a_parameter_without_checks_is_named() -> None:
    assert gaps({**OPERATIONS, "route": Newer}, SCHEMES, IDS) == ["route: no id is named for temperature"]


def test_a_feature_without_checks_is_named() -> None:
    @dataclass(slots=True, kw_only=True)
    class NewArgs(Args):
        mask: object = dataclasses.field(default=None, metadata={"feature": "mask", "since": 1})

    @dataclass(frozen=True, kw_only=True)
    class Masked(RouteOp):
        args: ClassVar[type[Args]] = NewArgs

    assert "route: no id is named for mask" in gaps({**OPERATIONS, "route": Masked}, SCHEMES, IDS)


def test_a_scheme_without_checks_is_named() -> None:
    found = gaps(OPERATIONS, {**SCHEMES, "q2_k": SCHEMES["q4_k"]}, IDS)
    assert [line.split(":")[0] for line in found] == ["scheme q2_k"] * 3


def test_an_id_that_goes_missing_is_named() -> None:
    fewer = {i for i in IDS if "two-ranks-all_gather-bf16" not in i and not i.startswith("L1/attention/softcap")}
    found = gaps(OPERATIONS, SCHEMES, fewer)
    assert "attention: softcap should be checked by L1/attention/softcap-*, which is no id" in found
    assert "collective all_gather: no id L1/collectives/two-ranks-all_gather-bf16" in found


def test_what_may_be_written_are_fields_of_operations() -> None:
    assert set(WRITABLE) <= set(OPERATIONS) == set(COVERAGE)
    for name, fields in WRITABLE.items():
        assert fields <= {f.name for f in dataclasses.fields(OPERATIONS[name].args)}, name

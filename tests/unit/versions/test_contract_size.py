"""How large the contract is: what a vendor must write stays at four methods, all else has a default that is proved."""

from __future__ import annotations

import inspect

from core.backend import Backend
from core_conformance.bare import BareBackend
from core_conformance.interface import conformance_ids, contract_size
from core_conformance.must_pass_lists import must_pass
from core_conformance.records import Outcome
from core_conformance.run import run_suite
from core_conformance.target import load_target

MUST = {"probe", "open", "supports", "bind"}


def test_a_vendor_must_write_four_methods() -> None:
    size = contract_size()
    print(size)  # with -s, or where it fails
    assert size.required == MUST == set(Backend.__abstractmethods__)
    assert size.num_methods == len(MUST) + len(size.defaulted)


def test_the_size_counts_what_is_there() -> None:
    size = contract_size()
    assert {"plan", "pack", "comm", "close"} <= size.defaulted and not size.defaulted & MUST
    assert size.num_operations == sum(check_id.startswith("L1/operations/") for check_id in must_pass(["L1"]))
    assert size.num_parameters > size.num_operations and size.num_record_fields > size.num_optional > 10
    assert str(size).startswith("4 required methods, ")


def test_the_bare_backend_is_nothing_but_the_four() -> None:
    own = {name for name, _ in inspect.getmembers(BareBackend, inspect.isfunction) if name in vars(BareBackend)}
    assert own == MUST
    for name in contract_size().defaulted:
        assert getattr(BareBackend, name) is getattr(Backend, name)


def test_every_default_passes_the_checks_that_define_it_on_the_bare_backend() -> None:
    """Those of L0, and of L1 in one type; the session `conformance` runs all levels on it."""
    names = {name for method in contract_size().defaulted for name in conformance_ids()[method]}
    ids = {i for i in must_pass(["L0", "L1"]) if any(i == name or i.startswith(f"{name}/") for name in names)}
    wanted = {i for i in ids if not i.endswith(("fp16", "fp32"))}
    report = run_suite(load_target("reference"), ["L0", "L1"], select=wanted.__contains__)
    outcomes = {record.id: record.outcome for record in report.records if record.id in wanted}
    assert len(wanted) > 20 and outcomes == dict.fromkeys(wanted, Outcome.PASS), report.summary()

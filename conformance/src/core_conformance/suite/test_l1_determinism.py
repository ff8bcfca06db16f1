"""L1: a determinism class that a backend declares is kept, bit by bit."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import torch

from core.backend import Kind
from core.backend.negotiate import Resolved
from core.backend.ops import Determinism, OpSpec
from core_conformance.checks import check
from core_conformance.operations.determinism_ops import ROW_CASES, Case
from core_conformance.operations.determinism_requests import CHUNKED, REQUEST_CASES
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_dense import DTYPES

_ASKED = (Determinism.D0, Determinism.D2)


def _declared(row: Resolved, asked: Determinism) -> Determinism:
    """What the operation as it is bound is worth: the least of its parts; the core's composites keep what is asked."""
    if row.parts:
        return min(_declared(part, asked) for part in row.parts)
    return row.verdict.determinism if row.kind is Kind.NATIVE else max(asked, Determinism.D1)


def _with_class(subject: Subject, op: OpSpec, asked: Determinism) -> tuple[OpSpec, Determinism]:
    wanted = dataclasses.replace(op, determinism=asked)
    subject.bind(wanted)
    declared = _declared(subject.binder.resolve(wanted), asked)
    subject.notes[f"declared when {asked.name} is asked"] = declared.name
    return wanted, declared


@check("L1/determinism", [f"{name}-{dtype}" for name in ROW_CASES for dtype in ("bf16", "fp32")])
def test_rows(subject: Subject, variant: str) -> None:
    """D1: the same bits when done again. D2: the same bits for a row alone, first, last, and among others."""
    name, dtype = variant.rsplit("-", 1)
    case = ROW_CASES[name]
    for asked in _ASKED:
        _check(subject, case, *_with_class(subject, case.op(DTYPES[dtype]), asked))


@check("L1/determinism/requests", [f"{name}-{dtype}" for name in REQUEST_CASES for dtype in ("bf16", "fp32")])
def test_requests(subject: Subject, variant: str) -> None:
    """The same for whole requests: decodes, chunks and prompts beside each other, over other blocks."""
    name, dtype = variant.rsplit("-", 1)
    case = REQUEST_CASES[name]
    for asked in _ASKED:
        _check(subject, case, *_with_class(subject, case.op(DTYPES[dtype]), asked))


@check("L1/determinism/chunks", [f"{name}-{dtype}" for name in CHUNKED for dtype in ("bf16", "fp32")])
def test_chunks(subject: Subject, variant: str) -> None:
    """D3: the same bits for a prompt in one step and in chunks."""
    name, dtype = variant.rsplit("-", 1)
    make, run = CHUNKED[name]
    for asked in (Determinism.D0, Determinism.D3):
        op, declared = _with_class(subject, make(DTYPES[dtype]), asked)
        if declared >= Determinism.D3:
            whole, chunks = run(subject, op)
            subject.equal(op, chunks, whole, f"(declared {declared.name}: a prompt in chunks) result")


def _check(subject: Subject, case: Case, op: OpSpec, declared: Determinism) -> None:
    """Compares runs of the same units, and of some of them."""
    units = list(range(len(case.lengths)))
    whole = case.run(subject, op, units)
    if declared >= Determinism.D1:
        subject.equal(op, case.run(subject, op, units), whole, f"(declared {declared.name}: done again) result")
    if declared < Determinism.D2:
        return
    ends = list(accumulate(case.lengths))
    for chosen in ([0], [units[-1]], units[1:3], units[2:]):
        expected = torch.cat([whole[ends[unit] - case.lengths[unit] : ends[unit]] for unit in chosen])
        what = f"(declared {declared.name}: {'alone' if len(chosen) == 1 else 'among others'}) result"
        subject.equal(op, case.run(subject, op, chosen), expected, what)

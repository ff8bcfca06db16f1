"""L1: `bind` keeps what `supports` says, operation by operation."""

from __future__ import annotations

from core.backend import Kind
from core.backend.negotiate import judge
from core_conformance.checks import check
from core_conformance.operations.samples import SAMPLES
from core_conformance.subject import Subject


@check("L1/operations", list(SAMPLES))
def test_bind_agrees_with_supports(subject: Subject, variant: str) -> None:
    """A plain form of each operation: NATIVE gives a callable, anything else is refused by the backend itself."""
    op = SAMPLES[variant]
    verdict = judge(subject.backend, subject.target.info, op, subject.target.device)
    if verdict.kind is Kind.NATIVE:
        assert callable(subject.bind(op)), f"bind({op.describe()}) gave nothing callable"
    else:
        subject.must_refuse(op)

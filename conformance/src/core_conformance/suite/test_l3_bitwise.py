"""L3: log-probabilities that must be equal bit by bit, as far as the device's determinism classes reach."""

from __future__ import annotations

from typing import Any

from core.backend import Kind
from core.backend.ops import Determinism
from core_conformance.checks import check
from core_conformance.engines.drafters import GoldenDrafter
from core_conformance.engines.goldens import greedy, prompt_of
from core_conformance.engines.rig import Rig, engine
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Mismatch, Subject

_COUNT = 6
_CASES: dict[str, tuple[Determinism, dict[str, Any]]] = {
    "again": (Determinism.D1, {}),
    "batch": (Determinism.D2, {}),
    "chunks": (Determinism.D3, {"max_num_batched_tokens": 7}),
    "cached": (Determinism.D3, {"cache": {"enable_prefix_caching": True}}),
    "recompute": (Determinism.D3, {"force_preemption": True}),
    "drafts": (Determinism.D3, {}),
}
"""What changes, from what class on it may not show, and how the engine is made for it."""


@check("L3/bitwise", [f"{c}-{m}" for c in _CASES for m in ("llama", "gemma3")])
def test_bits_do_not_change(subject: Subject, variant: str) -> None:
    """Once as the engine is by default, if its operations are of the class; once with class D3 asked of all of them.

    Again, among others, in chunks, behind a cached prefix, after preemption, and verified as drafts.
    """
    case, model = variant.split("-")
    least, options = _CASES[case]
    reached, refusal = Determinism.D0, ""
    compared = 0
    for deterministic in (False, True):
        try:
            with engine(subject, model, deterministic=deterministic, **_plain({})) as rig:
                reached = max(reached, _class_of(rig))
                if _class_of(rig) < least:
                    continue
                expected = _logprobs(rig, subject)
        except UnsupportedOutcome as error:
            refusal = f"; class D3 is refused: {error}"
            continue
        drafter = None
        if case == "drafts":
            drafter = GoldenDrafter("random", [greedy(model, _prompt(subject), _COUNT)])
        with engine(subject, model, deterministic=deterministic, drafter=drafter, **_plain(options)) as rig:
            others = 3 if case == "batch" else 0
            found = [_logprobs(rig, subject, others) for _ in range(2 if case == "cached" else 1)]
        compared += 1
        for got in found:
            if got != expected:
                raise Mismatch(f"class {least.name}: log-probabilities of {model}, {case}: {got}, alone {expected}")
    if not compared:
        raise UnsupportedOutcome(f"class {least.name} is needed, its operations are of class {reached.name}{refusal}")


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {"cache": {"enable_prefix_caching": False}, **options}


def _prompt(subject: Subject) -> tuple[int, ...]:
    return prompt_of(subject.block_size + 3, seed=5)


def _logprobs(rig: Rig, subject: Subject, num_others: int = 0) -> list[tuple[float, ...]]:
    mine = rig.start(_prompt(subject), max_tokens=_COUNT, logprobs=2)
    for other in range(num_others):
        rig.start(prompt_of(5 + 3 * other, seed=other), max_tokens=_COUNT)
    return [entry.logprobs for output in rig.finish()[mine] for entry in output.new_logprobs]


def _class_of(rig: Rig) -> Determinism:
    """The least class of the model's operations; a composed one is of the class that it was asked for."""
    leaves = [row for top, _ in rig.runner.table.rows() for row in top.flat() if not row.parts]
    return min(row.verdict.determinism if row.kind is Kind.NATIVE else row.op.determinism for row in leaves)

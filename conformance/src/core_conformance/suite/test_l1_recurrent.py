"""L1: recurrent layers: their arithmetic, and where states are read and written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core_conformance.checks import check
from core_conformance.diagnosis import Suspects
from core_conformance.operations.cache_memory import POISONS, Poison
from core_conformance.operations.recurrent import Lane, Layer, StateStep
from core_conformance.operations.recurrent_layers import conv1d, gated_delta, ssd
from core_conformance.subject import Mismatch, Subject
from core_conformance.suite.test_l1_dense import DTYPES
from core_conformance.tolerance import recurrence_bound

_MAKERS: dict[str, Callable[..., Layer]] = {"conv1d": conv1d, "gated_delta": gated_delta, "ssd": ssd}
_FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "conv1d": {
        "no-bias": {"bias": False},
        "linear": {"activation": "none"},
        "two-taps": {"width": 2},
        "float32-state": {"state_dtype": DTYPES["fp32"]},
    },
    "gated_delta": {"no-l2norm": {"qk_l2norm": False}, "one-to-one": {"num_k_heads": 4}, "square": {"v_dim": 16}},
    "ssd": {
        "unclamped": {"dt_min": 0.0, "dt_max": float("inf")},
        "one-group": {"num_groups": 1},
        "group-a-head": {"num_groups": 4},
    },
}
_BATCHES: dict[str, tuple[list[Lane], int]] = {
    "mixed": (
        [
            Lane(tokens=0, slots=(5,)),
            Lane(tokens=1, slots=(3,)),
            Lane(tokens=1, slots=(9,), accepted=0),
            Lane(tokens=4, slots=(1,)),
            Lane(tokens=17, slots=(12,), accepted=0),
        ],
        0,
    ),
    "drafts": (
        [
            Lane(tokens=1, slots=(3, 4, 5), accepted=2),
            Lane(tokens=2, slots=(6, 7, 8), accepted=3),
            Lane(tokens=3, slots=(9, 10, 11)),
            Lane(tokens=5, slots=(12, 13, 14), accepted=0),
        ],
        0,
    ),
    "checkpoints": (
        [
            Lane(tokens=1, slots=(1, 2), accepted=2, checkpoint=12),
            Lane(tokens=2, slots=(3, 4), accepted=0, checkpoint=13),
            Lane(tokens=6, slots=(5, 6), checkpoint=7),
            Lane(tokens=9, slots=(8, 9), accepted=0),
        ],
        0,
    ),
    "padding": ([Lane(tokens=1, slots=(3,)), Lane(tokens=1, slots=(7,), accepted=0)], 3),
}
_CASES = [f"{batch}-{dtype}" for batch in _BATCHES for dtype in DTYPES]


def _form(variant: str, operation: str) -> Layer:
    form, name = variant.rsplit("-", 1)
    return _MAKERS[operation](DTYPES[name], **_FORMS[operation][form])


def _form_ids(operation: str) -> list[str]:
    return [f"{form}-{dtype}" for form in _FORMS[operation] for dtype in DTYPES]


def _batch(subject: Subject, operation: str, variant: str) -> None:
    batch, name = variant.split("-")
    lanes, padding = _BATCHES[batch]
    check_step(subject, StateStep(subject, _MAKERS[operation](DTYPES[name]), lanes, padding=padding))


@check("L1/conv1d", _CASES)
def test_conv1d(subject: Subject, variant: str) -> None:
    """Decodes, prompts from zero, drafts after an accepted head, checkpoints, and padding that writes nothing."""
    _batch(subject, "conv1d", variant)


@check("L1/gated_delta", _CASES)
def test_gated_delta(subject: Subject, variant: str) -> None:
    """The same for the gated delta rule."""
    _batch(subject, "gated_delta", variant)


@check("L1/ssd", _CASES)
def test_ssd(subject: Subject, variant: str) -> None:
    """The same for Mamba-2."""
    _batch(subject, "ssd", variant)


@check("L1/conv1d/form", _form_ids("conv1d"))
def test_forms_of_conv1d(subject: Subject, variant: str) -> None:
    """Without bias, without activation, of two taps, and with a state in float32."""
    check_step(subject, StateStep(subject, _form(variant, "conv1d"), _BATCHES["mixed"][0]))


@check("L1/gated_delta/form", _form_ids("gated_delta"))
def test_forms_of_gated_delta(subject: Subject, variant: str) -> None:
    """Keys that are not normalised, a key head for each value head, square states."""
    check_step(subject, StateStep(subject, _form(variant, "gated_delta"), _BATCHES["mixed"][0]))


@check("L1/ssd/form", _form_ids("ssd"))
def test_forms_of_ssd(subject: Subject, variant: str) -> None:
    """Step sizes that are not clamped, one group for all heads, one for each."""
    check_step(subject, StateStep(subject, _form(variant, "ssd"), _BATCHES["mixed"][0]))


@check("L1/recurrent/chunks", [f"{name}-{dtype}" for name in _MAKERS for dtype in DTYPES])
def test_chunks_carry_the_state_on(subject: Subject, variant: str) -> None:
    """A prompt in chunks of 1, 6 and 4 tokens gives what it gives in one step, and ends in the same state."""
    operation, name = variant.rsplit("-", 1)
    layer = _MAKERS[operation](DTYPES[name])
    subject.bind(layer.op)
    whole = StateStep(subject, layer, [Lane(tokens=11, slots=(4,), accepted=0)])
    plane, outs, start = whole.plane("nan"), [], 0
    for count in (1, 6, 4):
        step = StateStep(subject, layer, [Lane(tokens=count, slots=(4,), accepted=int(start > 0))])
        step.inputs = layer.tokens(whole.inputs, slice(start, start + count))
        outs.append(subject.get(step.run(plane)))
        start += count
    exact, kept = whole.exact()
    plain, plain_kept = whole.exact(torch.float32)
    what = "(chunks of 1, 6 and 4) result"
    subject.agree(layer.op, torch.cat(outs), exact, _bound(whole, exact, plain), what, places=whole.places)
    _check_state(subject, whole, plane[4], kept[4], plain_kept[4], 4)


@check("L1/recurrent/no-tokens", list(_MAKERS))
def test_a_step_without_tokens_changes_nothing(subject: Subject, variant: str) -> None:
    """Requests that compute nothing keep their states bit by bit; the result is empty."""
    layer = _MAKERS[variant](DTYPES["fp32"])
    subject.bind(layer.op)
    step = StateStep(subject, layer, [Lane(tokens=0, slots=(2,)), Lane(tokens=0, slots=(5,), accepted=0)])
    check_step(subject, step)


def check_step(subject: Subject, step: StateStep) -> None:
    """Outputs, states, and every slot that the step must leave alone, over both poisons."""
    subject.bind(step.layer.op)
    exact, kept = step.exact()
    plain, plain_kept = step.exact(torch.float32)
    for poison in POISONS:
        plane = step.plane(poison)
        before = subject.get(plane)
        out, what = step.run(plane), f"(slots {poison}) result"
        real = out[: step.num_tokens]
        bound, suspects = _bound(step, exact, plain), _suspects(step)
        subject.agree(step.layer.op, real, exact, bound, what, places=step.places, suspects=suspects)
        for slot, state in kept.items():
            _check_state(subject, step, plane[slot], state, plain_kept[slot], slot)
        _check_others(subject, step, plane, before, set(kept), poison)


def _check_others(
    subject: Subject, step: StateStep, plane: Tensor, before: Tensor, written: set[int], poison: Poison
) -> None:
    after = subject.get(plane)
    others = [slot for slot in range(step.num_slots) if slot not in written]
    for slot in others:
        if not torch.equal(after[slot].view(torch.uint8), before[slot].view(torch.uint8)):
            whose = "the null slot, which nobody may write" if slot == 0 else "not a slot of this step"
            raise Mismatch(f"{step.layer.op.describe()}: it wrote to slot {slot} (over {poison}), {whose}")


def _check_state(subject: Subject, step: StateStep, got: Tensor, state: Tensor, plain: Tensor, slot: int) -> None:
    op, what = step.layer.op, f"state in slot {slot} "
    if op.name == "conv1d":
        subject.equal(op, got, state.to(getattr(torch, step.layer.state_dtype.value)), what)
    else:
        subject.agree(op, got, state, recurrence_bound(state, plain, _length(step), torch.float32), what)


def _bound(step: StateStep, exact: Tensor, plain: Tensor) -> Tensor:
    return recurrence_bound(exact, plain, _length(step), getattr(torch, step.layer.op.dtype.value))


def _length(step: StateStep) -> int:
    longest = max((lane.tokens for lane in step.lanes), default=1)
    return longest * math.prod(step.layer.state_shape[-2:])


def _suspects(step: StateStep) -> Suspects:
    """What the usual bugs with states answer: each request from the wrong start."""

    def suspects(got: Tensor) -> dict[str, Tensor]:
        lanes = step.lanes
        starts = {
            "state: every request starts from zeros": [_from(lane, 0) for lane in lanes],
            "state: it is read from the first slot, not from that of the last accepted token": [
                _from(lane, min(lane.accepted, 1)) for lane in lanes
            ],
            "state: num_accepted 0 does not start from zeros": [_from(lane, max(lane.accepted, 1)) for lane in lanes],
        }
        found = {}
        for name, changed in starts.items():
            other = StateStep(step.subject, step.layer, changed, step.seed, step.num_slots, step.padding)
            found[name] = other.exact()[0]
        return found

    return suspects


def _from(lane: Lane, accepted: int) -> Lane:
    return Lane(tokens=lane.tokens, slots=lane.slots, accepted=accepted, checkpoint=lane.checkpoint)

"""What a failed comparison says of the likely fault: from patterns alone, and from bugs planted in kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from core.backend import Verdict, torch_dtype
from core.backend.ops import Determinism, OpSpec
from core.backend.reference import COMPOSITES
from core.backend.reference.cache import spans
from core.spec import DeviceInfo
from core_conformance.bare import INFO
from core_conformance.diagnosis import Evidence, Places, diagnose, known, logit_factor
from core_conformance.mutants.backend import MutantBackend, mutant_target
from core_conformance.subject import Mismatch, Subject
from core_conformance.suite import (
    test_l1_attention,
    test_l1_dense,
    test_l1_determinism,
    test_l1_experts,
    test_l1_latent,
    test_l1_linear,
    test_l1_minor,
    test_l1_probes,
    test_l1_recurrent,
)
from core_conformance.target import Target

BF16 = test_l1_dense.DTYPES["bf16"]
FP32 = test_l1_dense.DTYPES["fp32"]


# -- patterns ----------------------------------------------------------------------------------------------------------


def told(change: Callable[[Tensor], Any], *shape: int, bound: float = 1e-3, **more: Any) -> str:
    """The diagnosis of random numbers after a change in place, or of what the change returns."""
    ref = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    got = ref.clone()
    changed = change(got)
    got = changed if isinstance(changed, Tensor) else got
    limit = torch.full_like(ref, bound)
    return diagnose(Evidence(got=got, ref=ref, bound=limit, wrong=~((got - ref).abs() <= limit), **more))


def add(*index: Any) -> Callable[[Tensor], None]:
    """Random errors where the index points."""

    def change(x: Tensor) -> None:
        x[index] += torch.rand(x[index].shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype) + 0.5

    return change


def fill(value: float) -> Callable[[Tensor], None]:
    """One head of one row."""

    def change(x: Tensor) -> None:
        x[2, 1] = value

    return change


TWO_REQUESTS = Places(requests=[0] * 4 + [1] * 8, positions=[*range(4), *range(8)], block_size=4, window=3)


@pytest.mark.parametrize(
    ("change", "places", "text"),
    [
        (fill(math.nan), None, "poison: NaN came through"),
        (fill(8e37), None, "poison: 8e+37 came through"),
        (fill(math.inf), None, "overflow: infinity"),
        (fill(0.0), None, "nothing written: the 12 wrong elements are zero"),
        (lambda x: x * 1.01, None, "scale: everything is multiplied by 1.01"),
        (lambda x: -x, None, "scale: everything is multiplied by -1"),
        (lambda x: x + 0.25, None, "offset: 0.25 is added to everything"),
        (lambda x: x[:, [1, 0, 2]], None, "head map: head 0 shows head 1's result, head 1 shows head 0's result"),
        (add(slice(None), [0, 2]), None, "head map: heads 0, 2 are wrong in every row"),
        (lambda x: torch.cat((x[1:], x[-1:])), None, "shift: row t holds what row t + 1 should"),
        (lambda x: torch.cat((x[:1], x[:-1])), None, "shift: row t holds what row t - 1 should"),
        (add(slice(9, 12)), None, "tile tail: only rows from 9 on are wrong, of 12"),
        (add(slice(None), slice(None), slice(8, 12)), None, "tile tail: only columns from 8 on are wrong, of 12"),
        (add(slice(None), slice(None), slice(0, 4)), None, "part: only the first 4 of 12 columns are wrong"),
        (lambda x: x[..., torch.arange(12).view(6, 2).flip(1).flatten()], None, "order: each row has the right values"),
        (add(5, 1, 7), None, "one element: all others are right"),
        (add([3, 6, 7, 8, 9, 10, 11]), TWO_REQUESTS, "window: all rows from position 2 on"),
        (add([8, 9, 10, 11]), TWO_REQUESTS, "block boundary: all rows from position 4 on are wrong"),
        (add([0, 4, 8]), TWO_REQUESTS, "block boundary: only rows at the first position of a block of 4"),
        (add([9]), TWO_REQUESTS, "block boundary: nothing is wrong before position 5"),
        (add([3, 11]), TWO_REQUESTS, "tail: only the last position of each request"),
        (add([4, 6, 10]), TWO_REQUESTS, "one request: rows of request 1 are wrong"),
    ],
)
def test_patterns_name_the_kind_of_fault(change: Callable[[Tensor], Any], places: Places | None, text: str) -> None:
    if text.startswith("window"):
        change = add([2, 3, 6, 7, 8, 9, 10, 11])
    if "position 5" in text:  # not at a boundary: it is only one request
        text = "one request: rows of request 1 are wrong"
    assert told(change, 12, 3, 12, places=places).startswith(text)


def test_small_errors_everywhere_are_rounding() -> None:
    noise = torch.rand(12, 3, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert told(lambda x: x + 3e-3 * noise, 12, 3, 12).startswith("rounding: no error is above 3 bounds")


def test_a_known_fault_comes_before_every_pattern() -> None:
    shown = torch.full((12, 3, 12), 2.0, dtype=torch.float64)
    assert told(lambda x: shown, 12, 3, 12, suspects=known({"mask: it is ignored": shown})) == "mask: it is ignored"


def test_a_pattern_that_says_nothing_gives_nothing() -> None:
    places = [(row * 5 % 12, row % 3, row * 7 % 12) for row in range(9)]
    change = add(*([at[axis] for at in places] for axis in range(3)))
    assert told(change, 12, 3, 12) == ""


def test_the_factor_on_logits_follows_from_two_shares() -> None:
    gap = math.log(3.0) * 1.25
    assert logit_factor((1 / (1 + math.exp(gap)), 1 / (1 + math.exp(-gap))), math.log(3.0)) == pytest.approx(1.25)
    assert math.isnan(logit_factor((0.0, 1.0), 1.0))


# -- planted bugs ------------------------------------------------------------------------------------------------------


def fault(operation: str, bug: Callable[[Any, Any, Any], Any], check: Callable[..., Any], *args: Any) -> str:
    """The message of a check of the suite against the reference with one bug.

    Args:
        bug: (op, honest callable, args) -> what the bad kernel gives.
    """

    def make(op: Any) -> Callable[[Any], Any]:
        honest = COMPOSITES[operation](op)
        return lambda record: bug(op, honest, record)

    subject = Subject(mutant_target({operation: make}))
    with torch.inference_mode(), pytest.raises(Mismatch) as caught:
        check(subject, *args)
    return str(caught.value)


def dice() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def changed(**fields: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The reference of an OpSpec with other parameters."""
    return lambda op, honest, args: COMPOSITES[op.name](
        dataclasses.replace(op, **{name: fn(op) for name, fn in fields.items()})
    )(args)


def reads_whole_blocks(op: Any, honest: Any, args: Any, *, masked: bool = False) -> Any:
    """A causal mask that ends with the block and not with the query; NaN is taken for 0 where `masked`."""
    size = args.plan.block_size
    out = honest(args)
    plane = args.cache[1]
    for span in spans(args.plan):
        if span.seq_len % size:
            block = int(args.plan.block_table[span.index, (span.seq_len - 1) // size])
            beyond = plane[block, -1, 0, : op.v_head_dim] * 1e-3
            out[span.end - 1] += beyond.nan_to_num(0.0) if masked else beyond
    return out


def beyond_the_block(op: Any, honest: Any, args: Any) -> Any:
    out = honest(args)
    for span in spans(args.plan):
        for token in range(span.start, span.end):
            if span.first_position + token - span.start >= args.plan.block_size:
                out[token] = out[token].flip(-1) + 1
    return out


def other_columns(op: Any, honest: Any, args: Any) -> Any:
    out = honest(args)
    out[:, 32:] = out[:, 32:] * 2 + 1
    return out


def short_sum(op: Any, honest: Any, args: Any) -> Any:
    whole = op.in_features // 32 * 32
    if whole in (0, op.in_features):
        return honest(args)
    x = args.x.clone()
    x[:, whole:] = 0
    return honest(dataclasses.replace(args, x=x))


def rounds_twice(op: Any, honest: Any, args: Any) -> Any:
    values = args.x.float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + op.eps)
    scale = (args.weight.float() + op.weight_offset).to(torch_dtype(op.dtype)).float()
    return (normed.to(torch.bfloat16).float() * scale).to(args.x.dtype)


def next_angle(op: Any, honest: Any, args: Any) -> Any:
    positions = (args.positions + 1).clamp(max=len(args.cos_sin) - 1)
    return honest(dataclasses.replace(args, positions=positions))


def ignores_accepted(op: Any, honest: Any, args: Any) -> Any:
    group = args.plan.group
    first = dataclasses.replace(group, num_accepted=group.num_accepted.clamp(max=1))
    return honest(dataclasses.replace(args, plan=dataclasses.replace(args.plan, group=first)))


def next_expert(op: Any, honest: Any, args: Any) -> Any:
    return COMPOSITES["experts"](dataclasses.replace(op, first_expert=op.first_expert + 1))(args)


def reads_what_it_wrote(op: Any, honest: Any, args: Any) -> Any:
    for source, target in zip(args.source_slots.tolist(), args.target_slots.tolist(), strict=True):
        if source >= 0:
            for plane in args.cache:
                flat = plane.view(torch.uint8).flatten(0, 1)
                flat[target] = flat[source].clone()


def all_keys(op: Any, honest: Any, args: Any) -> Any:
    return honest(dataclasses.replace(args, indices=None))


MIXED = "mixed-gqa-fp32"
PLANTED: dict[str, tuple[str, Callable[[Any, Any, Any], Any], Callable[..., Any], tuple[Any, ...], str]] = {
    "poison": (
        "attention",
        reads_whole_blocks,
        test_l1_attention.test_shapes_around_the_block_boundary,
        (MIXED,),
        "poison: NaN came through; it reads memory that nobody owns",
    ),
    "large poison": (
        "attention",
        partial(reads_whole_blocks, masked=True),
        test_l1_attention.test_padding_requests_are_finite_and_harmless,
        (FP32,),
        "poison: 8.46e+34 came through, far beyond every value",
    ),
    "scale of a product": (
        "linear",
        lambda op, honest, args: honest(args) * 1.01,
        test_l1_linear.test_dense_products,
        (dice(), FP32),
        "scale: everything is multiplied by 1.01",
    ),
    "scale of logits": (
        "attention",
        changed(scale=lambda op: op.scale * 1.01),
        test_l1_probes.test_two_keys_with_a_fixed_gap,
        (FP32,),
        "scale: logits are multiplied by 1.01 more",
    ),
    "heads swapped": (
        "attention",
        lambda op, honest, args: honest(args).flip(1),
        test_l1_attention.test_shapes_around_the_block_boundary,
        (MIXED,),
        "head map: head 0 shows head 5's result",
    ),
    "window": (
        "attention",
        changed(window=lambda op: op.window + 1 if op.window else 0),
        test_l1_probes.test_counting,
        ("window-bf16",),
        "window: off by one, a key too many at its old end",
    ),
    "narrow window": (
        "attention",
        changed(window=lambda op: op.window - 1 if op.window > 1 else op.window),
        test_l1_attention.test_sliding_windows,
        ("odd-fp32",),
        "window: off by one, a key too few at its old end",
    ),
    "block boundary": (
        "attention",
        beyond_the_block,
        test_l1_attention.test_shapes_around_the_block_boundary,
        ("prefill-gqa-fp32",),
        "block boundary: all rows from position 16 on are wrong",
    ),
    "tail of N": (
        "linear",
        other_columns,
        test_l1_linear.test_dense_products,
        (dice(), FP32),
        "tile tail: only columns from 32 on are wrong",
    ),
    "tail of K": (
        "linear",
        short_sum,
        test_l1_linear.test_dense_products_with_bias,
        (dice(), BF16),
        "tile tail: it is the sum over the first 64 of 71 columns",
    ),
    "rounding": (
        "rms_norm",
        rounds_twice,
        test_l1_dense.test_rms_norm_of_heads_in_a_fused_product,
        (dice(), BF16),
        "rounding: no error is above",
    ),
    "eps": (
        "rms_norm",
        changed(eps=lambda op: 0.0),
        test_l1_dense.test_rms_norm_of_small_rows_is_held_up_by_eps,
        (dice(), FP32),
        "eps: it is left out",
    ),
    "angle": ("rope", next_angle, test_l1_dense.test_rope, (dice(), "halves-bf16"), "shift: rotated by the angle of"),
    "state": (
        "gated_delta",
        ignores_accepted,
        test_l1_recurrent.test_gated_delta,
        ("drafts-fp32",),
        "state: it is read from the first slot",
    ),
    "experts": (
        "experts",
        next_expert,
        test_l1_experts.test_products_of_experts,
        (dice(), "silu-fp32"),
        "shift: expert e gets what expert e",
    ),
    "moves": (
        "move_tokens",
        reads_what_it_wrote,
        test_l1_minor.test_all_reads_come_before_any_write,
        (test_l1_minor._CACHES["fp32"],),
        "order: a pair reads what a pair before it wrote",
    ),
    "sparse": (
        "mla",
        all_keys,
        test_l1_latent.test_sparse_attention_reads_the_chosen_keys_alone,
        ("mixed-fp32",),
        "indices: they are ignored, every key is read",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_named(name: str) -> None:
    operation, bug, check, args, text = PLANTED[name]
    message = fault(operation, bug, check, *args)
    assert message.startswith(f"{operation}(") and "expected" in message and "bound" in message
    assert f"; likely {text}" in message, message


def test_writing_what_may_only_be_read_fails() -> None:
    def scribbles(op: Any, honest: Any, args: Any) -> Any:
        out = honest(args)
        args.x.zero_()
        return out

    message = fault("act_mul", scribbles, test_l1_dense.test_act_mul, dice(), "silu-fp32")
    assert "wrote to 'x', which it may only read" in message


class Boastful(MutantBackend):
    """Claims that a row's bits do not depend on the batch."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        verdict = super().supports(op, device)
        return Verdict.native(determinism=Determinism.D2) if verdict.kind == "NATIVE" else verdict


@pytest.mark.parametrize("again", [False, True])
def test_a_determinism_class_that_is_not_kept_fails(again: bool) -> None:
    calls = [0]

    def make(op: Any) -> Callable[[Any], Any]:
        honest = COMPOSITES["linear"](op)

        def linear(args: Any) -> Tensor:
            calls[0] += again
            return honest(args) * (1 + 2.0**-6 * (calls[0] if again else len(args.x)))

        return linear

    subject = Subject(Target(info=INFO, make=lambda: Boastful({"linear": make})))
    with torch.inference_mode(), pytest.raises(Mismatch) as caught:
        test_l1_determinism.test_rows(subject, "linear-fp32")
    expected = "declared D2: done again" if again else "declared D2: alone"
    assert str(caught.value).startswith("linear(") and expected in str(caught.value)

"""experts: grouped products with a static capacity and nothing read on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from core.backend import Packed, Quantized, Verdict, torch_dtype
from core.backend.ops import Act, Determinism, ExpertsArgs, ExpertsOp
from core_triton.ops.products import SCHEMES, Form, form_of, input_format, weight_parts
from core_triton.ops.quantize import quantize_rows
from core_triton.ops.refusals import refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import Tuning, tunings

__all__ = ["Experts"]

_ORDER_BLOCK = 1024
"""Pairs that a program looks at in one go while it orders them."""
_COMBINE_BLOCK = 1024
_FEW_PAIRS = 16
"""Pairs of an expert, on average, up to which tiles of one expert are low."""


class Experts:
    """experts of one shape.

    Args:
        op: What is wanted. Above class D1 tiles have one height for all numbers of tokens.
        target: Where it runs.
    """

    def __init__(self, op: ExpertsOp, target: Target) -> None:
        from core_triton.kernels import experts as kernels

        self._kernels, self._op, self._target = kernels, op, target
        self._dtype = torch_dtype(op.dtype)
        self._fixed = op.determinism >= Determinism.D2

    def __call__(self, args: ExpertsArgs) -> Tensor:
        op, ids = self._op, args.expert_ids
        tokens = len(ids)
        out = torch.empty(tokens, op.hidden_size, dtype=self._dtype, device=ids.device)
        if not tokens:
            return out
        pairs_per_expert = tokens * op.top_k / op.num_experts
        name = "many" if self._fixed or pairs_per_expert > _FEW_PAIRS else "few"
        x: Act = args.x
        if op.scheme == "int8" and isinstance(x, Tensor):
            x = quantize_rows(x, "int8_row", self._target)
        first = form_of(x, args.gate_up, self._target)
        tile = self._tuned(first)[name]["BLOCK_M"]
        order = self._order(ids, tile)
        hidden = torch.empty(tokens * op.top_k, op.intermediate_size, dtype=self._dtype, device=ids.device)
        self._product(x, args.gate_up, order, hidden, first, name, gated=True)
        inner: Act = hidden
        if op.scheme == "int8":
            # Rows of other ranks' experts hold whatever was there before; nobody reads what becomes of them.
            inner = quantize_rows(hidden, "int8_row", self._target)
        second = form_of(inner, args.down, self._target)
        assert self._tuned(second)[name]["BLOCK_M"] == tile, "tiles of pairs have one height for both products"
        parts = torch.empty(tokens * op.top_k, op.hidden_size, dtype=self._dtype, device=ids.device)
        self._product(inner, args.down, order, parts, second, name, gated=False)
        self._kernels.combine_kernel[(tokens, -(-op.hidden_size // _COMBINE_BLOCK))](
            parts, args.weights, ids, out, op.num_experts, op.first_expert, op.hidden_size,
            TOP_K=op.top_k, BLOCK=_COMBINE_BLOCK, num_warps=4,
        )  # fmt: skip
        return out

    def _tuned(self, form: Form) -> dict[str, Tuning]:
        return tunings(form.table.replace("linear", "experts"), self._target)

    def _order(self, ids: Tensor, tile: int) -> tuple[Tensor, Tensor]:
        """(Pairs by expert in whole tiles, the expert of each tile)."""
        op, num_pairs = self._op, ids.numel()
        # Each expert leaves at most one tile unfilled, and has none without a pair.
        num_tiles = num_pairs // tile + min(op.num_experts, num_pairs)
        counts = torch.empty(op.num_experts, dtype=torch.int32, device=ids.device)
        pairs = torch.empty(num_tiles * tile, dtype=torch.int32, device=ids.device)
        tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
        self._kernels.count_kernel[(op.num_experts,)](
            ids, counts, num_pairs, op.first_expert, BLOCK=_ORDER_BLOCK, num_warps=4
        )
        self._kernels.order_kernel[(op.num_experts + 1,)](
            ids, counts, pairs, tile_experts, num_pairs, op.num_experts, op.first_expert, num_tiles,
            TILE=tile, BLOCK=_ORDER_BLOCK, BLOCK_EXPERTS=power_of_two(op.num_experts), num_warps=4,
        )  # fmt: skip
        return pairs, tile_experts

    def _product(
        self,
        x: Act,
        weight: Packed,
        order: tuple[Tensor, Tensor],
        out: Tensor,
        form: Form,
        name: str,
        *,
        gated: bool,
    ) -> None:
        op, (pairs, tile_experts) = self._op, order
        tuning = self._tuned(form)[name]
        parts = weight_parts(weight, form)
        stored, scale = parts["weight"], parts["scale"]
        plain, x_scale = (x.q, x.scale) if isinstance(x, Quantized) else (x, x)
        if form.fnuz and form.form == "fp8":
            plain = plain.view(torch.uint8)
        width = tuning["BLOCK_N"] // 2 if gated else tuning["BLOCK_N"]
        self._kernels.pair_product_kernel[(len(tile_experts), -(-out.shape[1] // width))](
            plain,
            x_scale,
            stored,
            scale,
            parts["zero"],
            pairs,
            tile_experts,
            out,
            out.shape[0],
            out.shape[1],
            plain.shape[1],
            plain.stride(0),
            x_scale.stride(0),
            stored.stride(1),
            stored.stride(0),
            scale.stride(1) if form.w_rows and scale.shape[1] > 1 else 0,
            scale.stride(0) if form.w_rows else 0,
            GATED=gated,
            ACTIVATION=op.activation,
            TOP_K=op.top_k,
            **form.constexprs(),
            BLOCK_M=tuning["BLOCK_M"],
            BLOCK_N=tuning["BLOCK_N"],
            BLOCK_K=form.block_k(tuning),
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
        )


def _refuse(op: ExpertsOp, target: Target) -> str:
    if op.scheme not in SCHEMES:
        return f"no kernel reads {op.scheme} weights: they are dequantized at load"
    return refuse_form(op)


def _bind(op: ExpertsOp, target: Target) -> Callable[[ExpertsArgs], Tensor]:
    return Experts(op, target)


def _verdict(op: ExpertsOp, target: Target) -> Verdict:
    kept = Determinism.D3 if op.determinism >= Determinism.D2 else Determinism.D1
    return Verdict.native(determinism=kept, input_format=input_format(op.scheme, target))


_SIGNATURE = {
    **dict.fromkeys(("pairs", "tile_experts"), "*i32"),
    **dict.fromkeys(("num_pairs", "num_columns", "depth", "x_stride", "x_scale_stride", "weight_stride"), "i32"),
    **dict.fromkeys(("weight_expert_stride", "scale_stride", "scale_expert_stride"), "i32"),
}
_DIVISIBLE = ("x", "weight", "out", "num_columns", "depth", "x_stride", "weight_stride", "weight_expert_stride")


def _builds(target: Target) -> Iterator[Build]:
    from core_triton.kernels import experts as kernels

    fnuz = target.fp8_dtype is not None and target.fp8_dtype.value.endswith("fnuz")
    stored = "*u8" if not target.fp8 else "*fp8e4b8" if fnuz else "*fp8e4nv"
    cast = "fp8_cast" if target.fp8 else "fp8_bits"
    wide = Form(form=cast, table="linear_wide_x", w_group=128, w_rows=128, fnuz=fnuz)
    cases = [
        ("bf16", Form(form="dense", table="linear_dense"), "*bf16", "*bf16"),
        ("fp8 block, bf16 activations", wide, "*bf16", stored),
    ]
    if target.fp8:
        factor = 2 if fnuz else 1
        both = Form(
            form="fp8", table="linear_eight_bit", x_group=128, w_group=128, w_rows=128, x_factor=factor, fnuz=fnuz
        )
        cases.append(("fp8 block", both, "*u8" if fnuz else stored, stored))
    for label, form, x, weight in cases:
        for name, tuning in tunings(form.table.replace("linear", "experts"), target).items():
            yield Build(
                kernel=kernels.pair_product_kernel,
                label=f"experts {label} gated {name}",
                signature={
                    "x": x, "x_scale": "*fp32", "weight": weight, "scale": "*fp32", "zero": "*u8", "out": "*bf16",
                    **_SIGNATURE,
                },
                constexprs={
                    "GATED": True,
                    "ACTIVATION": "silu",
                    "TOP_K": 8,
                    **form.constexprs(),
                    "BLOCK_M": tuning["BLOCK_M"],
                    "BLOCK_N": tuning["BLOCK_N"],
                    "BLOCK_K": form.block_k(tuning),
                },
                num_warps=tuning.num_warps,
                num_stages=tuning.num_stages,
                matrix=True,
                divisible=_DIVISIBLE,
            )  # fmt: skip
    yield from _order_builds()


def _order_builds() -> Iterator[Build]:
    from core_triton.kernels import experts as kernels

    yield Build(
        kernel=kernels.count_kernel,
        label="experts, counts",
        signature={"ids": "*i32", "counts": "*i32", "num_pairs": "i32", "first_expert": "i32"},
        constexprs={"BLOCK": _ORDER_BLOCK},
    )
    yield Build(
        kernel=kernels.order_kernel,
        label="experts, order",
        signature={
            **dict.fromkeys(("ids", "counts", "pairs", "tile_experts"), "*i32"),
            **dict.fromkeys(("num_pairs", "num_experts", "first_expert", "num_tiles"), "i32"),
        },
        constexprs={"TILE": 64, "BLOCK": _ORDER_BLOCK, "BLOCK_EXPERTS": 256},
    )
    yield Build(
        kernel=kernels.combine_kernel,
        label="experts, sums",
        signature={
            "parts": "*bf16", "weights": "*fp32", "ids": "*i32", "out": "*bf16",
            **dict.fromkeys(("num_experts", "first_expert", "dim"), "i32"),
        },
        constexprs={"TOP_K": 8, "BLOCK": _COMBINE_BLOCK},
        divisible=("parts", "out", "dim"),
    )  # fmt: skip


register("experts", Kernel(refuse=_refuse, bind=_bind, builds=lambda target: list(_builds(target)), verdict=_verdict))

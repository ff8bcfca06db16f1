"""linear: dense, 8-bit and 4-bit weights, tiled by shape class, cut along K where there are few tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from core.backend import Packed, Quantized, Verdict, torch_dtype
from core.backend.ops import Act, Determinism, LinearArgs, LinearOp
from core_triton.ops.products import SCHEMES, Form, form_of, input_format, weight_parts
from core_triton.ops.quantize import quantize_rows
from core_triton.ops.refusals import FLOATS, refuse_form
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import Tuning

__all__ = ["Linear", "shape_class"]

_SPLIT_BLOCK = 256
"""Columns of a program that adds up shares."""
_LEAST_TILES = 4
"""Tiles along K that a share has at least."""
_DECODE_ROWS, _MID_ROWS = 16, 64


def shape_class(num_rows: int) -> str:
    """Class of a product with that many rows, as the tuning files name them."""
    if num_rows <= _DECODE_ROWS:
        return "decode"
    return "mid" if num_rows <= _MID_ROWS else "prefill"


class Linear:
    """linear of one shape.

    Args:
        op: What is wanted. Rows keep their bits in every batch where a class above D1 is asked for: one tiling for
            all numbers of rows, and K in one piece.
        target: Where it runs.
    """

    def __init__(self, op: LinearOp, target: Target) -> None:
        from core_triton.kernels.linear import add_splits_kernel, linear_kernel

        self._kernel, self._add_splits = linear_kernel, add_splits_kernel
        self._target, self._out_dtype = target, torch_dtype(op.out_dtype)
        self._columns, self._depth = op.out_features, op.in_features
        self._fixed = op.determinism >= Determinism.D2
        self._int8 = op.scheme == "int8"

    def __call__(self, args: LinearArgs) -> Tensor:
        x: Act = args.x
        if self._int8 and isinstance(x, Tensor):
            x = quantize_rows(x, "int8_row", self._target)
        form = form_of(x, args.weight, self._target)
        plain = x if isinstance(x, Tensor) else x.q
        rows = plain.shape[0]
        out = torch.empty(rows, self._columns, dtype=self._out_dtype, device=plain.device)
        if not rows:
            return out
        tuning = form.tuned(self._target)["mid" if self._fixed else shape_class(rows)]
        tiles = -(-rows // tuning["BLOCK_M"]) * -(-self._columns // tuning["BLOCK_N"])
        depth = self._share(form, tuning, tiles)
        splits = -(-self._depth // depth)
        if splits == 1:
            self._launch(x, args.weight, args.bias, out, form, tuning, (tiles, 1), depth)
            return out
        parts = torch.empty(splits, rows, self._columns, dtype=torch.float32, device=plain.device)
        self._launch(x, args.weight, None, parts, form, tuning, (tiles, splits), depth)
        self._add_splits[(rows, -(-self._columns // _SPLIT_BLOCK))](
            parts,
            out if args.bias is None else args.bias,
            out,
            rows,
            self._columns,
            splits,
            HAS_BIAS=args.bias is not None,
            BLOCK=_SPLIT_BLOCK,
        )
        return out

    def _share(self, form: Form, tuning: Tuning, tiles: int) -> int:
        """Elements along K of a share: all, or so few that the programs fill the chip."""
        block = form.block_k(tuning)
        steps = -(-self._depth // block)
        wanted = 1 if self._fixed else tuning["split_programs"] // tiles
        splits = max(1, min(wanted, steps // _LEAST_TILES))
        return -(-steps // splits) * block

    def _launch(
        self,
        x: Act,
        weight: Packed,
        bias: Tensor | None,
        out: Tensor,
        form: Form,
        tuning: Tuning,
        grid: tuple[int, int],
        depth: int,
    ) -> None:
        parts = weight_parts(weight, form)
        stored, scale = parts["weight"], parts["scale"]
        plain, x_scale = (x.q, x.scale) if isinstance(x, Quantized) else (x, x)
        if form.fnuz and form.form == "fp8":
            plain = plain.view(torch.uint8)
        self._kernel[grid](
            plain,
            x_scale,
            stored,
            scale,
            parts["zero"],
            out if bias is None else bias,
            out,
            plain.shape[0],
            self._columns,
            self._depth,
            depth,
            plain.stride(0),
            x_scale.stride(0),
            stored.stride(0),
            scale.stride(0) if scale.dim() and scale.shape[0] > 1 else 0,
            **form.constexprs(),
            HAS_BIAS=bias is not None,
            SPLIT=grid[1] > 1,
            BLOCK_M=tuning["BLOCK_M"],
            BLOCK_N=tuning["BLOCK_N"],
            BLOCK_K=form.block_k(tuning),
            GROUP_M=tuning["GROUP_M"],
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
        )


def _refuse(op: LinearOp, target: Target) -> str:
    if op.scheme not in SCHEMES:
        return f"no kernel reads {op.scheme} weights: they are dequantized at load"
    for dtype in (op.out_dtype, op.weight_dtype if op.scheme == "none" else op.dtype):
        if dtype not in FLOATS:
            return f"no kernel in {dtype.value}"
    return refuse_form(op, ("bias",))


def _bind(op: LinearOp, target: Target) -> Callable[[LinearArgs], Tensor]:
    return Linear(op, target)


def _verdict(op: LinearOp, target: Target) -> Verdict:
    kept = Determinism.D3 if op.determinism >= Determinism.D2 else Determinism.D1
    return Verdict.native(determinism=kept, input_format=input_format(op.scheme, target))


_SIZES = ("num_rows", "num_columns", "depth", "split_depth")
_STRIDES = ("x_stride", "x_scale_stride", "weight_stride", "scale_stride")
_SIGNATURE = dict.fromkeys((*_SIZES, *_STRIDES), "i32")
_DIVISIBLE = ("x", "weight", "out", "num_columns", "depth", "split_depth", "x_stride", "weight_stride")


def _builds(target: Target) -> Sequence[Build]:
    return [*_product_builds(target), _splits_build()]


def _product_builds(target: Target) -> Iterator[Build]:
    from core_triton.kernels.linear import linear_kernel

    for label, form, types in _cases(target):
        for name, tuning in form.tuned(target).items():
            if form.table == "linear_float32" and name != "mid":
                continue
            split = tuning["split_programs"] > 0
            yield Build(
                kernel=linear_kernel,
                label=f"{label} {name}",
                signature={**types, "out": "*fp32" if split else types["out"], **_SIGNATURE},
                constexprs={
                    **form.constexprs(),
                    "HAS_BIAS": not split,
                    "SPLIT": split,
                    "BLOCK_M": tuning["BLOCK_M"],
                    "BLOCK_N": tuning["BLOCK_N"],
                    "BLOCK_K": form.block_k(tuning),
                    "GROUP_M": tuning["GROUP_M"],
                },
                num_warps=tuning.num_warps,
                num_stages=tuning.num_stages,
                matrix=types["x"] != "*fp32",
                divisible=_DIVISIBLE,
            )


def _cases(target: Target) -> Iterator[tuple[str, Form, dict[str, str]]]:
    """Label, form and pointer types of every kind of weight on that target."""

    def types(x: str, weight: str, scale: str = "*fp32", zero: str = "*u8", bias: str = "*bf16") -> dict[str, str]:
        return {
            "x": x, "x_scale": "*fp32", "weight": weight, "scale": scale, "zero": zero, "bias": bias, "out": bias,
        }  # fmt: skip

    yield "linear bf16", Form(form="dense", table="linear_dense"), types("*bf16", "*bf16")
    yield "linear fp32", Form(form="dense", table="linear_float32"), types("*fp32", "*fp32", bias="*fp32")
    int8 = Form(form="int8", table="linear_eight_bit", w_rows=1, x_factor=1)
    yield "linear int8", int8, types("*i8", "*i8")
    int4 = Form(form="int4", table="linear_int4", w_group=128, w_rows=1)
    yield "linear int4", int4, types("*bf16", "*u8")
    fnuz = target.fp8_dtype is not None and target.fp8_dtype.value.endswith("fnuz")
    stored = "*u8" if not target.fp8 else "*fp8e4b8" if fnuz else "*fp8e4nv"
    wide = Form(
        form="fp8_cast" if target.fp8 else "fp8_bits", table="linear_wide_x", w_group=128, w_rows=128, fnuz=fnuz
    )
    yield "linear fp8 block, bf16 activations", wide, types("*bf16", stored)
    if target.fp8:
        x, factor = ("*u8", 2) if fnuz else (stored, 1)
        both = Form(
            form="fp8", table="linear_eight_bit", x_group=128, w_group=128, w_rows=128, x_factor=factor, fnuz=fnuz
        )
        yield "linear fp8 block", both, types(x, stored)
        yield "linear fp8 block ue8m0", both, types(x, stored, scale="*u8")
        row = Form(form="fp8", table="linear_eight_bit", w_rows=1, x_factor=factor, fnuz=fnuz)
        yield "linear fp8 channel", row, types(x, stored)


def _splits_build() -> Build:
    from core_triton.kernels.linear import add_splits_kernel

    pointers = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16"}
    return Build(
        kernel=add_splits_kernel,
        label="linear, sum of the shares",
        signature={**pointers, "num_rows": "i32", "num_columns": "i32", "num_splits": "i32"},
        constexprs={"HAS_BIAS": True, "BLOCK": _SPLIT_BLOCK},
        divisible=("parts", "out", "num_columns"),
    )


register("linear", Kernel(refuse=_refuse, bind=_bind, builds=_builds, verdict=_verdict))

"""Matrix products with stored weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.backend import Packed, Quantized, torch_dtype
from core.backend.ops import Act, LinearArgs, LinearOp
from core_ascend.vendor import npu
from core_ascend.weights import AscendPacked

__all__ = ["linear", "quantized_rows"]


def linear(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
    """The product on the matrix unit: dense, int8 rows by int8 weights, or 16-bit rows by 4-bit weights."""
    if op.scheme == "int8":
        return _int8(op)
    if op.scheme == "int4_group":
        return _int4(op)
    return _dense(op)


def _dense(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
    out_dtype = torch_dtype(op.out_dtype)

    def run(args: LinearArgs) -> Tensor:
        assert isinstance(args.x, Tensor)
        x, weight = args.x, args.weight
        columns = weight.parts()[0][0] if isinstance(weight, AscendPacked) else _rows(weight).t()
        if x.dtype != columns.dtype:
            x = x.to(columns.dtype)
        if out_dtype != x.dtype and out_dtype is torch.float32:
            y = torch.mm(x, columns, out_dtype=torch.float32)
            return y if args.bias is None else y + args.bias
        if args.bias is None:
            y = torch.matmul(x, columns)
        else:
            y = torch.addmm(args.bias, x, columns)
        return y if y.dtype == out_dtype else y.to(out_dtype)

    return run


def _rows(weight: Packed) -> Tensor:
    return weight.tensors()["weight"]


def quantized_rows(x: Act) -> tuple[Tensor, Tensor]:
    """(int8 rows, a scale for each row), by `npu_dynamic_quant` where the norm before has not done it."""
    if isinstance(x, Quantized):
        return x.q, x.scale.view(-1)
    q, scale = npu().npu_dynamic_quant(x, dst_type=torch.int8)
    return q, scale


def _int8(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
    vendor, out_dtype = npu(), torch_dtype(op.out_dtype)

    def run(args: LinearArgs) -> Tensor:
        assert isinstance(args.weight, AscendPacked)
        q, row_scale = quantized_rows(args.x)
        outs = [
            vendor.npu_quant_matmul(q, weight, scale, pertoken_scale=row_scale, output_dtype=out_dtype)
            for weight, scale in args.weight.parts()
        ]
        y: Tensor = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        return y if args.bias is None else y + args.bias

    return run


def _int4(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
    vendor, out_dtype = npu(), torch_dtype(op.out_dtype)

    def run(args: LinearArgs) -> Tensor:
        assert isinstance(args.weight, AscendPacked) and isinstance(args.x, Tensor)
        (weight, scale) = args.weight.parts()[0]
        y: Tensor = vendor.npu_weight_quant_batchmatmul(
            args.x, weight, scale, antiquant_offset=args.weight.tensors().get("offset"),
            antiquant_group_size=args.weight.group_size,
        )  # fmt: skip
        y = y if args.bias is None else y + args.bias
        return y.to(out_dtype)

    return run

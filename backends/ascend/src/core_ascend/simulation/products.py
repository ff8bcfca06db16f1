"""Numerics of quantized, grouped and transposed matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from core_ascend.limits import MAX_INNER
from core_ascend.simulation import chip_types
from core_ascend.simulation.calls import numerics
from core_ascend.simulation.dense import row_quantized
from core_ascend.simulation.faults import need, need_contiguous, need_types

__all__: list[str] = []

# torch hands element types over as their numbers.
_TYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] @ weight [K, N] of int8, exact, in float64."""
    return x.double() @ weight.double()


@numerics("npu::npu_dynamic_quant")
def _dynamic_quant(input, *, dst_type=None):  # type: ignore[no-untyped-def]
    need_types("npu_dynamic_quant", chip_types.halves, input=input)
    need(dst_type in (None, 1), f"npu_dynamic_quant: type {dst_type} is not simulated")
    need(input.dim() > 1, "npu_dynamic_quant: rows are needed")
    return row_quantized(input)


@numerics("aten::mm.dtype")
def _wide_mm(self, mat2, out_dtype):  # type: ignore[no-untyped-def]
    # torch's own operator, which torch_npu has for the NPU and torch has not for the CPU.
    need_types("mm", chip_types.halves, self=self, mat2=mat2)
    need(out_dtype is torch.float32, f"mm: a result in {out_dtype}")
    return self.float() @ mat2.float()


@numerics("npu::npu_quant_matmul")
def _quant_matmul(x1, x2, scale, *, pertoken_scale=None, bias=None, output_dtype=None):  # type: ignore[no-untyped-def]
    call = "npu_quant_matmul"
    need(x1.dtype == x2.dtype == torch.int8, f"{call}: {x1.dtype} by {x2.dtype}")
    need(x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0], f"{call}: {tuple(x1.shape)} by {tuple(x2.shape)}")
    need(max(x1.shape[-1], x2.shape[-1]) <= MAX_INNER, f"{call}: the last dim is larger than {MAX_INNER}")
    need(x1.numel() > 0, f"{call}: x1 is empty")
    need(scale.shape in ((1,), x2.shape[1:]), f"{call}: scale {tuple(scale.shape)} is neither one nor one a column")
    out = _TYPES[output_dtype]
    need(out in chip_types.halves, f"{call}: output {out}")
    allowed = (torch.float32, torch.bfloat16) if out is torch.bfloat16 else (torch.float32,)
    need(scale.dtype in allowed, f"{call}: scale is {scale.dtype} for an output of {out}")
    need(pertoken_scale is not None, f"{call}: a product without row scales is not simulated")
    need(pertoken_scale.dtype is torch.float32 and pertoken_scale.shape == x1.shape[:1], f"{call}: row scales")
    need(bias is None, f"{call}: a bias is not simulated")
    return (integer_product(x1, x2) * scale.double() * pertoken_scale.double()[:, None]).to(out)


@numerics("npu::npu_weight_quant_batchmatmul")
def _weight_quant(  # type: ignore[no-untyped-def]
    x,
    weight,
    antiquant_scale,
    antiquant_offset=None,
    quant_scale=None,
    quant_offset=None,
    bias=None,
    antiquant_group_size=0,
):
    call = "npu_weight_quant_batchmatmul"
    need_types(call, chip_types.halves, x=x, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
    rows = x.shape[1]
    values = unpacked_int4(weight) if weight.dtype is torch.int32 else weight
    need(values.shape[0] == rows, f"{call}: {tuple(x.shape)} by {tuple(values.shape)}")
    need(max(values.shape) <= MAX_INNER, f"{call}: {tuple(values.shape)}")
    need(not chip_types.is_fractal(weight), f"{call}: fractals are taken in graph mode alone")
    if antiquant_group_size:
        need(
            antiquant_group_size % 32 == 0 and 32 <= antiquant_group_size < rows,
            f"{call}: groups of {antiquant_group_size}",
        )
        groups = -(-rows // antiquant_group_size)
        need(antiquant_scale.shape == (groups, values.shape[1]), f"{call}: scale {tuple(antiquant_scale.shape)}")
        spread = [
            None if part is None else part.float().repeat_interleave(antiquant_group_size, 0)[:rows]
            for part in (antiquant_scale, antiquant_offset)
        ]
    else:
        spread = [None if part is None else part.float() for part in (antiquant_scale, antiquant_offset)]
    scale, offset = spread
    assert scale is not None
    dense = (values.float() if offset is None else values.float() + offset) * scale
    return (x.float() @ dense).to(x.dtype)


@numerics("npu::npu_convert_weight_to_int4pack")
def _int4pack(weight, inner_k_tiles=0):  # type: ignore[no-untyped-def]
    call = "npu_convert_weight_to_int4pack"
    need(weight.dtype is torch.int32 and weight.dim() == 2, f"{call}: int32, two dims")
    need_contiguous(call, weight=weight)
    need(weight.shape[1] % 8 == 0, f"{call}: the last dim is a multiple of 8")
    need(bool(((weight >= -8) & (weight <= 7)).all()), f"{call}: a value is outside of [-8, 7]")
    nibbles = (weight.long() & 15).unflatten(1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpacked_int4(words: Tensor) -> Tensor:
    """[K, N] int32 of words [K, N / 8], the lowest four bits first."""
    nibbles = (words.long()[..., None] >> (4 * torch.arange(8))) & 15
    return torch.where(nibbles > 7, nibbles - 16, nibbles).flatten(-2).to(torch.int32)


@numerics("npu::npu_transpose_batchmatmul")
def _transpose_batchmatmul(input, weight, *, perm_x1=None, perm_y=None):  # type: ignore[no-untyped-def]
    call = "npu_transpose_batchmatmul"
    need_types(call, chip_types.floats, input=input, weight=weight)
    need_contiguous(call, input=input, weight=weight)
    need(not chip_types.is_fractal(weight), f"{call}: the weight is plain")
    x = input.permute(perm_x1 or [0, 1, 2])
    need(
        x.shape[0] == weight.shape[0] and x.shape[2] == weight.shape[1],
        f"{call}: {tuple(x.shape)} by {tuple(weight.shape)}",
    )
    return torch.bmm(x.float(), weight.float()).permute(perm_y or [0, 1, 2]).to(input.dtype).contiguous()


@numerics("npu::npu_grouped_matmul")
def _grouped_matmul(x, weight, *, scale=None, per_token_scale=None, group_list=None, split_item=0, group_type=None,  # type: ignore[no-untyped-def]
                    group_list_type=0, output_dtype=None):  # fmt: skip
    call = "npu_grouped_matmul"
    need(len(x) == len(weight) == 1 and split_item in (2, 3) and group_type == 0, f"{call}: one tensor, split by rows")
    rows, experts = x[0], weight[0]
    need(
        experts.dim() == 3 and rows.shape[1] == experts.shape[1],
        f"{call}: {tuple(rows.shape)} by {tuple(experts.shape)}",
    )
    need(max(rows.shape[-1], experts.shape[-1]) <= MAX_INNER, f"{call}: an inner dim is larger than {MAX_INNER}")
    need(group_list is not None and group_list.dtype is torch.int64, f"{call}: the group list is an int64 tensor")
    need(
        group_list.shape == experts.shape[:1] and len(group_list) > 1, f"{call}: one group an expert, and more than one"
    )
    need(group_list_type == 1, f"{call}: running sums are not simulated")
    counts = group_list.tolist()
    need(min(counts) >= 0 and sum(counts) <= len(rows), f"{call}: groups of {counts} rows out of {len(rows)}")
    if scale is None:
        need_types(call, chip_types.floats, x=rows, weight=experts)
        dtype = rows.dtype
    else:
        need(rows.dtype == experts.dtype == torch.int8, f"{call}: scales beside {rows.dtype} by {experts.dtype}")
        dtype = _TYPES[output_dtype]
        need(
            per_token_scale[0].dtype is torch.float32 and per_token_scale[0].shape == rows.shape[:1],
            f"{call}: row scales",
        )
        need(scale[0].shape == (len(experts), experts.shape[2]), f"{call}: scales {tuple(scale[0].shape)}")
    out = torch.full((len(rows), experts.shape[2]), torch.nan, dtype=dtype)  # rows of no group hold what memory held
    start = 0
    for expert, count in enumerate(counts):
        part = slice(start, start + count)
        if scale is None:
            out[part] = (rows[part].float() @ experts[expert].float()).to(dtype)
        else:
            y = integer_product(rows[part], experts[expert]) * scale[0][expert].double()
            out[part] = (y * per_token_scale[0][part].double()[:, None]).to(dtype)
        start += count
    return [out]

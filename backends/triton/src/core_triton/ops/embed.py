"""embed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import EmbedArgs, EmbedOp
from core_triton.ops.products import SCHEMES, Form, form_of, weight_parts
from core_triton.ops.refusals import invariant, refuse_form
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target

__all__: list[str] = []

_BLOCK = 1024


def _constexprs(form: Form) -> dict[str, object]:
    """Bytes are decoded here on every chip: a gather is not held up by it."""
    word = "fp8_bits" if form.form.startswith("fp8") else form.form
    return {"FORM": word, "W_GROUP": form.w_group, "W_ROWS": form.w_rows, "FNUZ": form.fnuz, "BLOCK": _BLOCK}


def _bind(op: EmbedOp, target: Target) -> Callable[[EmbedArgs], Tensor]:
    from core_triton.kernels.embed import embed_kernel

    dtype, blocks = torch_dtype(op.dtype), -(-op.dim // _BLOCK)
    multiplier = torch.tensor(op.multiplier, dtype=dtype).item()

    def embed(args: EmbedArgs) -> Tensor:
        ids = args.token_ids
        out = torch.empty(len(ids), op.dim, dtype=dtype, device=ids.device)
        if len(ids):
            form = form_of(out, args.weight, target)
            parts = weight_parts(args.weight, form)
            stored, scale = parts["weight"], parts["scale"]
            embed_kernel[(len(ids), blocks)](
                ids,
                stored.view(torch.uint8) if form.form == "fp8_cast" else stored,
                scale,
                parts["zero"],
                out,
                op.dim,
                stored.stride(0),
                scale.stride(0) if scale.dim() and scale.shape[0] > 1 else 0,
                multiplier,
                **_constexprs(form),
                num_warps=4,
            )
        return out

    return embed


def _refuse(op: EmbedOp, target: Target) -> str:
    if op.scheme not in SCHEMES:
        return f"no kernel reads {op.scheme} weights: they are dequantized at load"
    return refuse_form(op)


def _builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.embed import embed_kernel

    forms = {
        "*bf16": Form(form="dense", table=""),
        "*i8": Form(form="int8", table="", w_rows=1),
        "*u8": Form(form="int4", table="", w_group=128, w_rows=1),
    }
    cases = [(f"embed {form.form}", stored, form) for stored, form in forms.items()]
    cases.append(("embed fp8 block", "*u8", Form(form="fp8_bits", table="", w_group=128, w_rows=128)))
    return [
        Build(
            kernel=embed_kernel,
            label=label,
            signature={
                "token_ids": "*i32", "weight": stored, "scale": "*fp32", "zero": "*u8", "out": "*bf16",
                "dim": "i32", "weight_stride": "i32", "scale_stride": "i32", "multiplier": "fp32",
            },
            constexprs=_constexprs(form),
            divisible=("weight", "out", "dim", "weight_stride"),
        )
        for label, stored, form in cases
    ]  # fmt: skip


register("embed", Kernel(refuse=_refuse, bind=_bind, builds=_builds, verdict=invariant))

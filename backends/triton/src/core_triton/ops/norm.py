"""rms_norm and reduce_norm of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import Act, ReduceNormArgs, ReduceNormOp, RmsNormArgs, RmsNormOp
from core_triton.ops.quantize import FORMATS, empty_quantized
from core_triton.ops.refusals import FLOATS, invariant, refuse_form
from core_triton.ops.rows import row_tiles, tuned_widths
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target

__all__ = ["NormRows"]


class NormRows:
    """The norm of rows [..., dim], as both operations share it.

    Args:
        op: dtype, dim, eps and weight_offset.
        target: Where it runs.
        form: Format of the result; "" is a plain tensor.
    """

    def __init__(self, op: RmsNormOp | ReduceNormOp, target: Target, form: str = "") -> None:
        from core_triton.kernels.norm import norm_kernel

        self._kernel = norm_kernel
        self._dtype, self._dim = torch_dtype(op.dtype), op.dim
        self._eps, self._offset, self._form = op.eps, op.weight_offset, form
        self._tiles = row_tiles(op.dim, target, 128 if form == "fp8_block128" else 16)

    def __call__(self, x: Tensor, weight: Tensor, residual: Tensor | None = None, post: Tensor | None = None) -> Act:
        """The norm of x, or of x (normed by `post`) + residual, which then lies in `residual`."""
        rows = x.numel() // self._dim
        quantized = empty_quantized(rows, self._dim, self._form, x.device) if self._form else None
        out = torch.empty(x.shape, dtype=self._dtype, device=x.device) if quantized is None else quantized.q
        if rows:
            heads, (stride, head_stride) = _strides(x)
            _, (r_stride, r_head_stride) = _strides(x if residual is None else residual)
            self._kernel[(self._tiles.programs(rows),)](
                x,
                x if residual is None else residual,
                weight,
                weight if post is None else post,
                out if quantized is None or self._form == "int8_row" else out.view(torch.uint8),
                x if quantized is None else quantized.scale,
                rows,
                heads,
                self._dim,
                stride,
                head_stride,
                r_stride,
                r_head_stride,
                self._eps,
                self._offset,
                HAS_RESIDUAL=residual is not None,
                HAS_POST=post is not None,
                FORMAT=self._form,
                **self._tiles.launch(),
            )
        return out if quantized is None else quantized


def _strides(x: Tensor) -> tuple[int, tuple[int, int]]:
    """Heads of [tokens, heads, dim], and the strides of both; [tokens, dim] has one head."""
    if x.dim() == 2:
        return 1, (x.stride(0), 0)
    assert x.dim() == 3, f"rows of {x.dim()} dims must have been flattened"
    return x.shape[1], (x.stride(0), x.stride(1))


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])


def _bind_rms_norm(op: RmsNormOp, target: Target) -> Callable[[RmsNormArgs], Tensor | tuple[Tensor, Tensor]]:
    norm = NormRows(op, target)

    def run(args: RmsNormArgs) -> Tensor | tuple[Tensor, Tensor]:
        x, shape = _flat(args.x), args.x.shape
        residual = None if args.residual is None else _flat(args.residual)
        y = norm(x, args.weight, residual)
        assert isinstance(y, Tensor)
        return y.view(shape) if residual is None else (y.view(shape), residual.view(shape))

    return run


def _bind_reduce_norm(op: ReduceNormOp, target: Target) -> Callable[[ReduceNormArgs], tuple[Act, Tensor]]:
    # One format only is worth a quantized result: consumers that differ get the plain tensor.
    norm = NormRows(op, target, op.out_formats[0] if len(op.out_formats) == 1 else "")

    def run(args: ReduceNormArgs) -> tuple[Act, Tensor]:
        return norm(args.partial, args.weight, args.residual, args.post_weight), args.residual

    return run


def _refuse_reduce_norm(op: ReduceNormOp, target: Target) -> str:
    if op.world > 1 or op.scatter:
        return "over several ranks the collective comes first, then the norm's own kernel"
    unknown = [form for form in op.out_formats if form not in FORMATS]
    return f"no kernel writes {', '.join(unknown)}" if unknown else refuse_form(op, ("post_norm",))


_SIGNATURE = {
    "num_rows": "i32",
    "heads": "i32",
    "dim": "i32",
    "x_stride": "i32",
    "x_head_stride": "i32",
    "residual_stride": "i32",
    "residual_head_stride": "i32",
    "eps": "fp32",
    "offset": "fp32",
}
_DIVISIBLE = ("x", "residual", "weight", "out", "dim", "x_stride", "residual_stride")


def _build(label: str, width: int, target: Target, dtype: str, form: str, residual: bool, post: bool) -> Build:
    from core_triton.kernels.norm import norm_kernel

    tiles = row_tiles(width, target, 128 if form == "fp8_block128" else 16)
    out = dtype if not form else "i8" if form == "int8_row" else "u8"
    pointers = dict.fromkeys(("x", "residual", "weight", "post_weight"), f"*{dtype}")
    return Build(
        kernel=norm_kernel,
        label=label,
        signature={**pointers, "out": f"*{out}", "out_scale": "*fp32", **_SIGNATURE},
        constexprs={
            "HAS_RESIDUAL": residual,
            "HAS_POST": post,
            "FORMAT": form,
            "ROWS": tiles.rows,
            "BLOCK": tiles.block,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible=_DIVISIBLE,
    )


def _rms_norm_builds(target: Target) -> Sequence[Build]:
    return [
        _build(f"rms_norm {word} {width}", width, target, word, "", residual=width > 128, post=False)
        for width, _ in tuned_widths(target)
        for word in (FLOATS.values() if width == 4096 else ("bf16",))
    ]


def _reduce_norm_builds(target: Target) -> Iterator[Build]:
    yield _build("reduce_norm post", 4096, target, "bf16", "", residual=True, post=True)
    for form in FORMATS:
        yield _build(f"reduce_norm {form}", 7168, target, "bf16", form, residual=True, post=False)


register(
    "rms_norm",
    Kernel(
        refuse=lambda op, target: refuse_form(op, ("residual",)),
        bind=_bind_rms_norm,
        builds=_rms_norm_builds,
        verdict=invariant,
    ),
)
register(
    "reduce_norm",
    Kernel(
        refuse=_refuse_reduce_norm,
        bind=_bind_reduce_norm,
        builds=lambda target: list(_reduce_norm_builds(target)),
        verdict=invariant,
    ),
)

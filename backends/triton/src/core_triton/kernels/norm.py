"""rms_norm and reduce_norm: norms of rows, with what comes before them and the format that comes after."""

import triton
import triton.language as tl

from core_triton.kernels.quantize import store_quantized

__all__ = ["norm_kernel"]


@triton.jit
def _normed(x, weight, columns, dim, eps, offset):
    mean = tl.sum(x * x, axis=1) / dim
    scale = tl.load(weight + columns, mask=columns < dim, other=0).to(tl.float32) + offset
    return x * tl.rsqrt(mean + eps)[:, None] * scale[None, :]


@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    post_weight,
    out,
    out_scale,
    num_rows,
    heads,
    dim,
    x_stride,
    x_head_stride,
    residual_stride,
    residual_head_stride,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_POST: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm of x, or of the sum of x (normed by `post_weight` where HAS_POST) and residual, which is written back.

    Grid (programs of ROWS rows). Row r is token r // heads, head r % heads; `out` is contiguous.

    Args:
        FORMAT: Of `out` and `out_scale`; "" is a plain tensor.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    row_mask = rows < num_rows
    inside = row_mask[:, None] & (columns < dim)[None, :]
    token, head = rows // heads, rows % heads
    from_ = x + (token * x_stride + head * x_head_stride)[:, None] + columns[None, :]
    values = tl.load(from_, mask=inside, other=0).to(tl.float32)
    if HAS_POST:
        values = _normed(values, post_weight, columns, dim, eps, offset).to(x.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        both = residual + (token * residual_stride + head * residual_head_stride)[:, None] + columns[None, :]
        total = (values + tl.load(both, mask=inside, other=0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(both, total, mask=inside)
        values = total.to(tl.float32)
    y = _normed(values, weight, columns, dim, eps, offset)
    if FORMAT == "":
        tl.store(out + rows[:, None] * dim + columns[None, :], y.to(out.dtype.element_ty), mask=inside)
    else:
        y = y.to(x.dtype.element_ty).to(tl.float32)
        store_quantized(y, rows, columns, inside, row_mask, out, out_scale, dim, FORMAT, BLOCK)

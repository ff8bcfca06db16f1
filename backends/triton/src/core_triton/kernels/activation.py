"""act_mul: a gate through its activation, times what it gates."""

import triton
import triton.language as tl

__all__ = ["act_mul_kernel", "activate"]


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of float32 values; large values of both signs saturate."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # 0.5 (1 + tanh(u)) is the logistic function of 2u.
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-twice))


@triton.jit
def act_mul_kernel(x, out, size, x_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of columns). `out` [rows, size] is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0).to(tl.float32)
    value = tl.load(x + row * x_stride + size + columns, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * size + columns, (activate(gate, ACTIVATION) * value).to(out.dtype.element_ty), mask=mask)

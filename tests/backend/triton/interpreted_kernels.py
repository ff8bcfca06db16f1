"""Kernels for the tests of the interpreter alone."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, out, n: tl.constexpr, precision: tl.constexpr):
    rows = tl.arange(0, n)[:, None]
    columns = tl.arange(0, n)[None, :]
    left, right = tl.load(a + rows * n + columns), tl.load(b + rows * n + columns)
    result = tl.dot(left, right, input_precision=precision)
    tl.store(out + rows * n + columns, result.to(out.dtype.element_ty))


@triton.jit
def cast(x, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def doubled(x, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(x + at) + tl.load(x + at))


@triton.jit
def summed(x, out, n: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, n)), 0))


@triton.jit
def shifted(x, out, first, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(x + first + at, mask=first + at < n, other=0.0))

"""From the numbers of a model to what a cache keeps."""

import triton
import triton.language as tl

__all__ = ["kept"]


@triton.jit
def kept(x, low, high, KIND: tl.constexpr, pointer):
    """float32 `x` as the element type of `pointer`.

    Args:
        KIND: "float" rounds; "float8" saturates first; "int8" rounds to nearest, ties to even, and saturates.
    """
    if KIND != "float":
        x = tl.minimum(tl.maximum(x, low), high)
    if KIND == "int8":
        # Beyond 2^23 a float32 has no fraction: the sum is rounded as floats are.
        x = (x + 12582912.0) - 12582912.0
    return x.to(pointer.dtype.element_ty)

"""What the interpreter computes once repaired: values instead of bit patterns, and addresses that are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["bounds_of", "quiet_numpy", "repair"]

_VALUES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e4b8": ml_dtypes.float8_e4m3fnuz,
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp8e5b16": ml_dtypes.float8_e5m2fnuz,
}
"""Types that the interpreter keeps as unsigned integers, by Triton's word."""

_EXTENTS: list[tuple[int, int]] = []
"""[first byte, past the last) of every tensor of the launch in progress."""


def quiet_numpy() -> AbstractContextManager[Any]:
    """No word about overflow or NaN: masked lanes compute on whatever they hold, as on a chip."""
    return np.errstate(all="ignore")


@contextmanager
def bounds_of(arguments: Iterable[Any]) -> Iterator[None]:
    """Within it, kernels may touch the bytes of the tensors among `arguments` and no others."""
    before = list(_EXTENTS)
    _EXTENTS[:] = sorted({_extent(x) for x in arguments if hasattr(x, "data_ptr") and x.numel()})
    try:
        yield
    finally:
        _EXTENTS[:] = before


def _extent(x: Any) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def repair(runtime: ModuleType) -> None:
    """Replaces what is wrong in `triton.runtime.interpreter`."""
    builder = runtime.InterpreterBuilder
    _repair_casts(runtime, builder)
    _repair_dot(runtime, builder)
    for name in ("binary_op", "unary_op", "create_clampf", "create_fma", "create_erf", "create_rsqrt"):
        _refuse_patterns(builder, name)
    _refuse_patterns(builder, "create_atomic_rmw", first=1)
    _repair_reductions(runtime)
    _check_addresses(builder)
    # Every integer sum was computed three times, for an assertion that is off.
    runtime.interpreter_builder.options = runtime.InterpreterOptions(sanitize_overflow=False)
    runtime.interpreter_builder.codegen_fns["min_dot_size"] = lambda a, b: (16, 16, 16)


def _float32(handle: Any) -> Any:
    """The values of a floating handle, in float32."""
    name = handle.dtype.scalar.name
    if name == "bf16":
        return (handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name in _VALUES:
        return np.ascontiguousarray(handle.data).view(_VALUES[name]).astype(np.float32)
    return handle.data.astype(np.float32, copy=False)


def _repair_casts(runtime: ModuleType, builder: Any) -> None:
    plain_cast, plain_convert = builder.cast_impl, builder.create_fp_to_fp

    def cast(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, source: Any, target: Any, *rest: Any) -> Any:
            held, wanted = source.dtype.scalar.name, target.scalar.name
            if held not in _VALUES and wanted not in _VALUES:
                return original(self, source, target, *rest)
            if held == wanted:
                return source
            data = _float32(source) if held in _VALUES else source.data
            if wanted in _VALUES:
                data = data.astype(np.float32, copy=False).astype(_VALUES[wanted])
                data = data.view(runtime._get_np_dtype(target))
            else:
                data = data.astype(runtime._get_np_dtype(target))
            return runtime.TensorHandle(data, target.scalar)

        return run

    def plain_float_cast(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        # float16, 32, 64 among themselves: numpy rounds to nearest even.
        if all(t.name in ("fp16", "fp32", "fp64") for t in (source.dtype.scalar, target.scalar)):
            return runtime.TensorHandle(source.data.astype(runtime._get_np_dtype(target)), target.scalar)
        return plain_convert(self, source, target, *rest)

    builder.cast_impl = cast(plain_cast)
    builder.create_fp_to_fp = cast(plain_float_cast)


def _repair_dot(runtime: ModuleType, builder: Any) -> None:
    precisions = runtime._ir.INPUT_PRECISION

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if a.dtype.scalar.is_floating():
            if a.data.dtype == np.float64:
                left, right = a.data, b.data
            else:
                left, right = _float32(a), _float32(b)
            if a.dtype.scalar.name == "fp32" and input_precision == precisions.TF32:
                left, right = _tf32(left), _tf32(right)
            product = np.matmul(left, right)
        else:
            # Exact in float64 up to 2^53, and far faster than numpy's integer product.
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return runtime.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    builder.create_dot = dot


def _tf32(x: Any) -> Any:
    """Rounded to 10 bits of mantissa, as the matrix unit does with float32 unless "ieee" is asked for."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    even = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = ((bits + np.uint32(0xFFF) + even) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def _refuse_patterns(builder: Any, name: str, first: int = 0) -> None:
    original = getattr(builder, name)

    def run(self: Any, *args: Any) -> Any:
        for value in args[first:]:
            kind = getattr(value, "dtype", None)
            if getattr(getattr(kind, "scalar", None), "name", "") in _VALUES:
                raise TypeError(f"{name} on {kind}, which no chip computes in: go through .to(tl.float32)")
        return original(self, *args)

    setattr(builder, name, run)


def _repair_reductions(runtime: ModuleType) -> None:
    check, reduce = runtime.ReduceScanOpInterface.check_tensor, runtime.ReduceOps.apply_impl
    standard = runtime.tl.standard
    # Without a word of numpy's about slices of nothing but NaN.
    quick = {standard._elementwise_max: np.fmax.reduce, standard._elementwise_min: np.fmin.reduce}

    def checked(self: Any, inputs: Any) -> None:
        check(self, inputs)
        for value in inputs:
            if value.dtype.scalar.name in _VALUES:
                raise TypeError(f"reduction of {value.dtype}, which no chip computes in: go through .to(tl.float32)")

    def apply(self: Any, inputs: Any) -> Any:
        found = quick.get(self.combine_fn)
        if found is None:
            return reduce(self, inputs)
        data = found(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, inputs[0].dtype)

    runtime.ReduceScanOpInterface.check_tensor = checked
    runtime.ReduceOps.apply_impl = apply


def _check_addresses(builder: Any) -> None:
    load, store, rmw, cas = (
        getattr(builder, name)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    )

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask.data, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask.data, "writes")
        return store(self, pointers, value, mask, *rest)

    def checked_rmw(self: Any, kind: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask.data, "updates")
        return rmw(self, kind, pointers, value, mask, *rest)

    def checked_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        _check(pointers, np.ones_like(pointers.data, dtype=bool), "updates")
        return cas(self, pointers, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_rmw, checked_cas


def _check(pointers: Any, mask: Any, verb: str) -> None:
    """Raises where a lane that is not masked points outside of the launch's tensors."""
    # A comparison keeps the type of its operands: a mask may come as integers.
    used = pointers.data if mask.all() else pointers.data[mask.astype(bool)]
    if not used.size:
        return
    first = int(used.min())
    end = int(used.max()) + max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    if not any(low <= first and end <= high for low, high in _EXTENTS):
        off = min((max(low - first, 0) + max(end - high, 0) for low, high in _EXTENTS), default=0)
        raise IndexError(f"{verb} {off} bytes outside of every tensor of the launch")

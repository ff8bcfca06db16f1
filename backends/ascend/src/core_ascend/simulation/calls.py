"""How CPU numerics are put behind torch_npu's own operators, and what each call is checked for on its way.

The dispatcher checks every call against the operator's schema. Where the operator has a Meta kernel, the first call of
each form also runs it on tensors without memory: shapes and types must be those that the numerics gave.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from core_ascend.simulation.faults import need

__all__ = ["CALLS", "META_CHECKS", "NUMERICS", "numerics", "put_behind"]

CALLS: Counter[str] = Counter()
"""How often each operator was called."""
META_CHECKS: Counter[str] = Counter()
"""How many forms of calls of each operator went through its Meta kernel."""
NUMERICS: dict[str, Callable[..., Any]] = {}
"""Operator ("npu::npu_rms_norm") to its numerics; filled by the modules beside this one."""

_forms: set[Any] = set()


def numerics(operator: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what an operator computes."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        NUMERICS[operator] = fn
        return fn

    return register


def put_behind() -> list[torch.library.Library]:
    """Gives every registered operator a CPU kernel; the result must be kept as long as they are wanted."""
    libraries = {space: torch.library.Library(space, "IMPL") for space in ("npu", "atb", "aten")}
    for operator, fn in NUMERICS.items():
        space, _, name = operator.partition("::")
        libraries[space].impl(name, _watched(operator, fn), "CPU")
    return list(libraries.values())


def _watched(operator: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    meta = torch._C._dispatch_has_kernel_for_dispatch_key(operator, "Meta")

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        CALLS[operator] += 1
        result = NUMERICS[operator](*args, **kwargs)
        if meta:
            _check_meta(operator, args, kwargs, result)
        return result

    return kernel


def _check_meta(operator: str, args: Any, kwargs: Any, result: Any) -> None:
    form = (operator, _form(args), _form(kwargs))
    if form in _forms:
        return
    _forms.add(form)
    space, _, name = operator.partition("::")
    packet, _, overload = name.partition(".")
    call = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    meta_args, meta_kwargs = tree_map(_without_memory, (args, kwargs))
    expected = call(*meta_args, **meta_kwargs)
    META_CHECKS[operator] += 1
    for index, (got, want) in enumerate(zip(_tensors(result), _tensors(expected), strict=True)):
        if not want.numel() or not got.numel():
            continue  # an output that was not asked for
        need(got.dtype == want.dtype, f"{operator}: result {index} is {got.dtype}, its Meta kernel says {want.dtype}")
        same = tuple(got.shape) == tuple(want.shape)
        need(same, f"{operator}: result {index} is {tuple(got.shape)}, its Meta kernel says {tuple(want.shape)}")


def _without_memory(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _form(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return str(spec), tuple((x.dtype, x.dim()) if isinstance(x, Tensor) else type(x) for x in leaves)


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]

"""The tripwire: a model's forward may call contract operations and views, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from bare import DEVICE, INFO, opened
from torch import Tensor

from core.backend.negotiate import Binder
from core.backend.ops import ActMulArgs, ActMulOp, RmsNormArgs, RmsNormOp
from core.backend.tripwire import Tripwire, TripwireError
from core.spec import DType


@pytest.fixture(params=[False, True], ids=["grad", "inference"])
def wire(request: pytest.FixtureRequest) -> Iterator[Tripwire]:
    """A fresh tripwire, in inference mode and outside it: torch hands over other calls in each."""
    with torch.inference_mode(request.param), torch.no_grad():
        yield Tripwire()


def guarded(wire: Tripwire) -> Callable[[ActMulArgs], Tensor]:
    binder = Binder(opened(), INFO, DEVICE, block_size=4, tripwire=wire)
    fn: Callable[[ActMulArgs], Tensor] = binder.bind(ActMulOp(dtype=DType.FLOAT32, size=2))
    return fn


VIEWS: dict[str, Callable[[Tensor], object]] = {
    "slice": lambda x: x[1:3],
    "select": lambda x: x[0],
    "ellipsis": lambda x: x[..., :2],
    "none": lambda x: x[:, None],
    "view": lambda x: x.view(2, 8),
    "reshape": lambda x: x.reshape(8, 2),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "transpose": lambda x: x.transpose(0, 1),
    "T": lambda x: x.T,
    "permute": lambda x: x.permute(1, 0),
    "split": lambda x: x.split(2, dim=1),
    "split sizes": lambda x: x.split((1, 3), dim=1),
    "unbind": lambda x: x.unbind(0),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "expand": lambda x: x[:1].expand(3, -1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "chunk": lambda x: x.chunk(2, dim=-1),
    "shape": lambda x: (x.shape, x.dtype, x.stride(), len(x)),
}

CALLS: dict[str, Callable[[Tensor], object]] = {
    "add": lambda x: x + 1,
    "in place": lambda x: x.add_(1),
    "matmul": lambda x: x @ x,
    "cat": lambda x: torch.cat((x, x)),
    "to": lambda x: x.to(torch.bfloat16),
    "clone": lambda x: x.clone(),
    "empty": lambda x: torch.empty(3),
    "item": lambda x: x[0, 0].item(),
    "index": lambda x: x[torch.tensor([0])],
    "write": lambda x: x.__setitem__(0, 1.0),
    "copying reshape": lambda x: x.T.reshape(16),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_pass(wire: Tripwire, name: str) -> None:
    x = torch.randn(4, 4)
    with wire:
        VIEWS[name](x)


@pytest.mark.parametrize("name", CALLS)
def test_raw_calls_raise_and_are_named(wire: Tripwire, name: str) -> None:
    x = torch.randn(4, 4)
    with pytest.raises(TripwireError, match="the model calls aten::"), wire:
        CALLS[name](x)


def test_bound_operations_pass_and_are_listed(wire: Tripwire) -> None:
    fn = guarded(wire)
    x = torch.randn(3, 8)
    with wire:
        out = fn(ActMulArgs(x=x[:, :4]))
        fn(ActMulArgs(x=x[:, 4:]))
        with pytest.raises(TripwireError, match="aten::mul"):
            out * 2
    assert wire.operations == ["act_mul", "act_mul"]


def test_it_is_armed_again_after_an_operation_that_failed(wire: Tripwire) -> None:
    fn, x = guarded(wire), torch.randn(2, 5)
    with wire:
        with pytest.raises(RuntimeError):
            fn(ActMulArgs(x=x))
        with pytest.raises(TripwireError):
            torch.empty(3)


def test_outside_of_it_nothing_is_watched(wire: Tripwire) -> None:
    with wire:
        pass
    assert (torch.ones(2) + 1).sum() == 4


def test_records_are_checked_where_the_wire_is(wire: Tripwire) -> None:
    binder = Binder(opened(), INFO, DEVICE, block_size=4, tripwire=wire)
    norm = binder.bind(RmsNormOp(dtype=DType.FLOAT32, dim=2, eps=1e-6))
    x, weight = torch.ones(1, 2), torch.ones(2)
    with wire, pytest.raises(AssertionError, match="feature 'residual'"):
        norm(RmsNormArgs(x=x, weight=weight, residual=x))
    with wire, pytest.raises(AssertionError, match="rms_norm takes RmsNormArgs"):
        norm(ActMulArgs(x=x))

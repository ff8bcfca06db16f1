"""What a check works with: one opened backend, its operations, and comparisons that leave numbers in the record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import Backend, Kind, Packed, WeightSource, torch_dtype
from core.backend.negotiate import Binder
from core.backend.ops import OpSpec
from core.backend.reference import COMPOSITES, DECOMPOSITIONS
from core.backend.weights import SCHEMES, Role
from core.errors import UnsupportedError
from core.spec import DType
from core_conformance.diagnosis import Evidence, Places, Suspects, diagnose
from core_conformance.ownership import guarded
from core_conformance.records import UnsupportedOutcome
from core_conformance.target import Target

__all__ = ["HostWeight", "Mismatch", "Subject", "oracle", "wide_op"]


class Mismatch(AssertionError):
    """A number is wrong: names the operation, the first wrong index, the value, the bound, and the likely fault."""


class HostWeight(WeightSource):
    """A weight of a test, in host memory.

    Args:
        parts: Tensors as the scheme names them.
        scheme: The scheme.
        shape: Logical shape.
    """

    def __init__(self, parts: dict[str, Tensor], scheme: str, shape: Sequence[int]) -> None:
        self.name, self.scheme, self.shape = "conformance.weight", scheme, tuple(shape)
        self._parts = parts

    def parts(self) -> dict[str, Tensor]:
        return self._parts


def oracle(op: OpSpec) -> Callable[[Any], Any]:
    """The reference of `op` as it is, on the host, coarse operations from reference parts."""
    make = COMPOSITES[op.name]
    if op.name not in DECOMPOSITIONS:
        return make(op)
    return make(op, **{name: oracle(part) for name, part in DECOMPOSITIONS[op.name](op).items()})


def wide_op(op: Any) -> Any:
    """The same operation in float64; the cache keeps its type."""
    changes: dict[str, Any] = {"dtype": DType.FLOAT64}
    if hasattr(op, "out_dtype"):
        changes["out_dtype"] = DType.FLOAT64
    return dataclasses.replace(op, **changes)


class Subject:
    """One check's view of the backend under test.

    Args:
        target: The backend.
        backend: An opened instance; the shared one of the target by default.
    """

    def __init__(self, target: Target, backend: Backend | None = None) -> None:
        self.target = target
        self.backend = backend or target.backend
        self.block_size = self.backend.capabilities.block_sizes[0]
        self.binder = self.make_binder(self.block_size)
        self.err: float | None = None
        self.bound: float | None = None
        self.ratio: float | None = None
        self.notes: dict[str, Any] = {}
        self.model = self.dtype = self.quantization = self.parallelism = ""

    def make_binder(self, block_size: int) -> Binder:
        """A binder for that block size with a table of its own."""
        return Binder(self.backend, self.target.info, self.target.device, block_size=block_size)

    @property
    def op_table(self) -> str:
        """Hash of how this check's operations were resolved; empty where it bound none."""
        return self.binder.table.hash if self.binder.table.rows() else ""

    @property
    def kinds(self) -> dict[str, str]:
        """How each operation of this check, parts included, was done."""
        return {row.op.name: row.kind.value for top, _ in self.binder.table.rows() for row in top.flat()}

    def bind(self, op: OpSpec) -> Callable[[Any], Any]:
        """The callable of `op` as the core would bind it; a call fails where it writes what it may only read.

        Raises:
            UnsupportedOutcome: the backend declares that it has no way to do `op`, and refuses to bind it.
            Mismatch: it binds what it declares unsupported.
        """
        row = self.binder.resolve(op)
        if row.kind is not Kind.NO:
            fn = self.binder.bind(op)
            if not callable(fn):
                raise Mismatch(f"bind({op.describe()}) gives {fn!r}, which cannot be called")
            return guarded(op, fn, self.get, Mismatch)
        if not row.parts and self.backend.supports(op, self.target.device).kind is not Kind.NATIVE:
            self.must_refuse(op)
        raise UnsupportedOutcome(f"{op.describe()}: {row.reason}")

    def must_refuse(self, op: OpSpec) -> None:
        """Asserts that the backend itself raises UnsupportedError when asked for what it does not call NATIVE."""
        try:
            self.backend.bind(op)
        except UnsupportedError:
            return
        except Exception as error:
            raise Mismatch(
                f"{op.describe()} is declared unsupported, and bind raises {type(error).__name__} ({error}); "
                "it must raise UnsupportedError"
            ) from error
        raise Mismatch(f"{op.describe()} is declared unsupported, and bind gives a kernel: the declaration is stale")

    def is_native(self, op: OpSpec) -> bool:
        """Whether the backend has a kernel of its own for it."""
        return self.binder.resolve(op).kind is Kind.NATIVE

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor on the device, with its strides made contiguous."""
        source = tensor.contiguous()
        target = torch.empty(source.shape, dtype=source.dtype, device=self.backend.device)
        self.backend.to_device(source, target).wait()
        return target

    def get(self, tensor: Tensor) -> Tensor:
        """A copy of a device tensor on the host."""
        host, pending = self.backend.to_host(tensor)
        pending.wait()
        return host.clone()

    def pack(
        self, parts: dict[str, Tensor], scheme: str, shape: Sequence[int], dtype: DType, role: Role = "linear"
    ) -> Packed:
        """A weight in the backend's own form."""
        source = HostWeight(parts, scheme, shape)
        return self.backend.pack(source, SCHEMES[scheme], role, torch_dtype(dtype))

    def agree(
        self,
        op: OpSpec | str,
        got: Tensor,
        ref: Tensor,
        bound: Tensor | float,
        what: str = "result",
        *,
        places: Places | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        """Asserts |got - ref| <= bound element by element, NaN and infinities included, and notes the worst ratio.

        Args:
            op: Named in the message.
            got: From the device.
            ref: Exact, float64.
            bound: Shape of `ref`, or one number.
            what: Which of the operation's results.
            places: Where the rows stand, for the diagnosis.
            suspects: What known faults would give, for the diagnosis.
        """
        host = self._same_shape(op, got, ref, what).double()
        exact = ref.double()
        limit = torch.as_tensor(bound, dtype=torch.float64).expand_as(exact)
        special = ~exact.isfinite()
        error = torch.where(special | ~host.isfinite(), math.inf, (host - exact).abs())
        error = torch.where(special & ((host == exact) | (host.isnan() & exact.isnan())), 0.0, error)
        self._note(error, limit)
        wrong = error > limit
        if wrong.any():
            evidence = Evidence(got=host, ref=exact, bound=limit, wrong=wrong, places=places, suspects=suspects)
            raise Mismatch(_message(op, what, host, exact, evidence))

    def equal(
        self,
        op: OpSpec | str,
        got: Tensor,
        ref: Tensor,
        what: str = "result",
        *,
        places: Places | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        """Asserts bit equality (NaN counts as equal to NaN); `places` and `suspects` as in `agree`."""
        host = self._same_shape(op, got, ref, what)
        name = op if isinstance(op, str) else op.describe()
        if host.dtype != ref.dtype:
            raise Mismatch(f"{name}: {what} has dtype {host.dtype}, expected {ref.dtype}")
        wrong = _raw(host) != _raw(ref)
        if ref.is_floating_point():
            wrong &= ~(host.float().isnan() & ref.float().isnan())
        if wrong.any():
            exact = ref.double()
            nothing = torch.zeros_like(exact)
            evidence = Evidence(
                got=host.double(), ref=exact, bound=nothing, wrong=wrong, places=places, suspects=suspects
            )
            raise Mismatch(_message(op, what, host, ref, evidence))

    def _same_shape(self, op: OpSpec | str, got: Tensor, ref: Tensor, what: str) -> Tensor:
        host = self.get(got)
        if host.shape != ref.shape:
            name = op if isinstance(op, str) else op.describe()
            raise Mismatch(f"{name}: {what} has shape {tuple(host.shape)}, expected {tuple(ref.shape)}")
        return host

    def _note(self, error: Tensor, limit: Tensor) -> None:
        if not error.numel():
            return
        ratio = torch.where(error == 0, 0.0, error / limit)
        worst = int(ratio.argmax())
        if self.ratio is None or float(ratio.flatten()[worst]) > self.ratio:
            self.ratio = float(ratio.flatten()[worst])
            self.err, self.bound = float(error.flatten()[worst]), float(limit.flatten()[worst])


def _raw(x: Tensor) -> Tensor:
    """The same bits under an integer type, so that -0.0 differs from 0.0; integers as they are."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(sizes[x.element_size()]) if x.is_floating_point() else x


def _message(op: OpSpec | str, what: str, got: Tensor, ref: Tensor, evidence: Evidence) -> str:
    wrong = evidence.wrong
    index = tuple(int(i) for i in wrong.nonzero()[0])
    name = op if isinstance(op, str) else op.describe()
    likely = diagnose(evidence)
    return (
        f"{name}: {what}{list(index)} is {_number(got[index])}, expected {_number(ref[index])}, "
        f"bound {evidence.bound[index].item():.3g}; {int(wrong.sum())} of {wrong.numel()} elements are wrong"
        + (f"; likely {likely}" if likely else "")
    )


def _number(x: Tensor) -> str:
    """Integers with every digit."""
    value = x.item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)

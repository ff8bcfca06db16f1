"""Resolution at load: every operation becomes NATIVE, COMPOSITE, or an error that names it. Nothing hops later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from core.backend.base import Backend, Kind, Verdict
from core.backend.ops import OpSpec, check_args, newer_fields
from core.backend.ops.cache import AttentionOp, KvWriteOp
from core.backend.ops.family import IndexTopkOp, MlaOp
from core.backend.reference import COMPOSITES, DECOMPOSITIONS
from core.backend.tripwire import Tripwire
from core.errors import ContractVersionError, UnsupportedError
from core.spec import BackendInfo, CacheKind, DeviceInfo, KVCacheSpec

__all__ = ["Binder", "Observer", "OpTable", "Resolved", "check_api", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """How one operation is done.

    Args:
        op: What was asked.
        kind: NATIVE, COMPOSITE or NO.
        reason: Why not NATIVE.
        verdict: The backend's own answer.
        parts: For a declared decomposition, how its parts are done.
    """

    op: OpSpec
    kind: Kind
    reason: str
    verdict: Verdict
    parts: tuple[Resolved, ...] = ()

    def flat(self) -> Iterator[Resolved]:
        """This and every part, depth first."""
        yield self
        for part in self.parts:
            yield from part.flat()


Observer = Callable[[Resolved, Callable[..., Any]], Callable[..., Any]]
"""Gets how an operation is done and its callable, and gives the callable that is used in its place."""


class OpTable:
    """What a model asked of a backend and how each operation is done; printed by `core doctor`."""

    def __init__(self) -> None:
        self._rows: dict[OpSpec, Resolved] = {}
        self._uses: dict[OpSpec, int] = {}

    def add(self, row: Resolved) -> None:
        """Counts one more use of an operation."""
        self._rows[row.op] = row
        self._uses[row.op] = self._uses.get(row.op, 0) + 1

    def rows(self) -> list[tuple[Resolved, int]]:
        """(resolution, uses), in the order of first use."""
        return [(row, self._uses[op]) for op, row in self._rows.items()]

    def refused(self) -> list[Resolved]:
        """Operations that the device cannot do."""
        return [row for row in self._rows.values() if row.kind is Kind.NO]

    def count(self, kind: Kind) -> int:
        """Different operations of that kind."""
        return sum(row.kind is kind for row in self._rows.values())

    def to_json(self) -> list[dict[str, Any]]:
        """Rows as JSON values, sorted, so that equal tables are equal texts."""
        rows = [_row_json(row) | {"uses": uses} for row, uses in self.rows()]
        return sorted(rows, key=lambda row: json.dumps(row["spec"], sort_keys=True))

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of `to_json()`; part of every conformance record."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _row_json(row: Resolved) -> dict[str, Any]:
    found: dict[str, Any] = {
        "op": row.op.name,
        "spec": row.op.to_dict(),
        "kind": row.kind.value,
        "reason": row.reason,
        "parts": [_row_json(part) for part in row.parts],
    }
    if row.kind is Kind.NATIVE and row.verdict.activation_format:
        found["activations"] = row.verdict.activation_format
    return found


def check_api(info: BackendInfo) -> None:
    """Raises ContractVersionError where this core cannot drive the plugin, naming both versions."""
    conflict = info.version_conflict()
    if conflict:
        raise ContractVersionError(conflict)


def judge(backend: Backend, info: BackendInfo, op: OpSpec, device: DeviceInfo) -> Verdict:
    """The plugin's verdict, for what its minor of the contract has.

    It is not called for what came later: an operation is composed then, and one with a later field that is not at its
    default is NO.
    """
    major, _, built = info.api
    if op.minor > built:
        return Verdict.composite(f"built for contract {major}.{built}, which has no {op.name}")
    newer = newer_fields(op, built)
    if newer:
        return Verdict.no(
            f"built for contract {major}.{built}, whose {op.name} knows no {', '.join(newer)}: upgrade its package"
        )
    verdict = backend.supports(op, device)
    if verdict.kind is Kind.NATIVE and verdict.determinism < op.determinism:
        return Verdict.composite(f"its kernel is {verdict.determinism.name}, {op.determinism.name} was asked for")
    return verdict


class Binder:
    """Resolves and binds the operations of one model on one opened backend, and keeps the table.

    Args:
        backend: The backend; opened before `bind`, not needed to be for `resolve`.
        info: How it announced itself.
        device: Which device.
        block_size: Tokens a KV block, to know the layouts of caches.
        tripwire: Raises where a model calls torch itself between operations; for tests.
        observe: Wraps every callable as it is bound, parts of decompositions included; for measurements.
    """

    def __init__(
        self,
        backend: Backend,
        info: BackendInfo,
        device: DeviceInfo,
        *,
        block_size: int,
        tripwire: Tripwire | None = None,
        observe: Observer | None = None,
    ) -> None:
        check_api(info)
        self.backend = backend
        self.info = info
        self.device = device
        self.block_size = block_size
        self.table = OpTable()
        self._tripwire = tripwire
        self._observe = observe

    def resolve(self, op: OpSpec) -> Resolved:
        """How `op` would be done; kind NO where it cannot be. Binds nothing and counts nothing."""
        verdict = judge(self.backend, self.info, op, self.device)
        if verdict.kind is not Kind.COMPOSITE:
            return Resolved(op=op, kind=verdict.kind, reason=verdict.reason, verdict=verdict)
        decompose = DECOMPOSITIONS.get(op.name)
        if decompose is not None:
            return self._resolve_parts(op, verdict, decompose(op))
        refusal = self._private_layout(op)
        if refusal:
            return Resolved(op=op, kind=Kind.NO, reason=refusal, verdict=verdict)
        return Resolved(op=op, kind=Kind.COMPOSITE, reason=verdict.reason, verdict=verdict)

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        """The callable of `op`: native, or composed of bound parts. Counts it in the table.

        Raises:
            UnsupportedError: naming operation, reason and remedy.
        """
        row = self.resolve(op)
        self.table.add(row)
        if row.kind is Kind.NO:
            raise UnsupportedError(
                op.describe(),
                f"backend {self.info.name!r}: {row.reason}",
                "see `core doctor` for the whole table; choose another --device, --dtype or --quantization",
            )
        return self._guarded(op, self._callable(row))

    def _resolve_parts(self, op: OpSpec, verdict: Verdict, parts: dict[str, OpSpec]) -> Resolved:
        rows = tuple(self.resolve(part) for part in parts.values())
        refused = [row for row in rows if row.kind is Kind.NO]
        kind = Kind.NO if refused else Kind.COMPOSITE
        reason = f"its part {refused[0].op.name}: {refused[0].reason}" if refused else verdict.reason
        return Resolved(op=op, kind=kind, reason=reason, verdict=verdict, parts=rows)

    def _callable(self, row: Resolved) -> Callable[..., Any]:
        fn = self._make(row)
        return fn if self._observe is None else self._observe(row, fn)

    def _make(self, row: Resolved) -> Callable[..., Any]:
        if row.kind is Kind.NATIVE:
            return self.backend.bind(row.op)
        compose = COMPOSITES[row.op.name]
        if not row.parts:
            return compose(row.op)
        names = DECOMPOSITIONS[row.op.name](row.op)
        bound = {name: self._callable(part) for name, part in zip(names, row.parts, strict=True)}
        return compose(row.op, **bound)

    def _private_layout(self, op: OpSpec) -> str:
        spec = _cache_spec(op)
        layout = getattr(op, "layout", None) if spec is None else self.backend.kv_layout(spec, self.block_size)
        if layout is None or layout.canonical:
            return ""
        return f"no kernel for it, and composites cannot read the private KV layout {layout.id!r}"

    def _guarded(self, op: OpSpec, fn: Callable[..., Any]) -> Callable[..., Any]:
        tripwire = self._tripwire
        if tripwire is None:
            return fn

        def guarded(args: Any) -> Any:
            check_args(op, args)
            with tripwire.inside(op):
                return fn(args)

        return guarded


def _cache_spec(op: OpSpec) -> KVCacheSpec | None:
    """The cache that an operation touches; None for those without one, and for states, which have one layout."""
    if isinstance(op, AttentionOp):
        return None if op.has("ragged") else op.cache_spec
    if isinstance(op, KvWriteOp):
        kind = CacheKind.FULL if op.v_head_dim else CacheKind.MLA
        return KVCacheSpec(
            kind=kind, num_kv_heads=op.num_kv_heads, head_dim=op.head_dim, v_head_dim=op.v_head_dim, dtype=op.kv_dtype
        )
    if isinstance(op, MlaOp):
        dim = op.latent_dim + op.rope_dim
        return KVCacheSpec(kind=CacheKind.MLA, num_kv_heads=1, head_dim=dim, v_head_dim=0, dtype=op.kv_dtype)
    if isinstance(op, IndexTopkOp):
        return KVCacheSpec(kind=CacheKind.INDEX, num_kv_heads=1, head_dim=op.head_dim, v_head_dim=0, dtype=op.kv_dtype)
    return None

"""How a model would run on a device, operation by operation: no weight is read and no device is taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from core import plugins
from core.backend import Backend, Kind
from core.backend.negotiate import Binder, Resolved
from core.config import EngineConfig
from core.engine.operation_list import OperationList
from core.errors import ConfigError
from core.exec.build import build_context
from core.exec.sampler import sample_ops
from core.exec.step_graphs import GraphRule, graph_rule
from core.layers import BuildContext
from core.loader.checkpoint import open_checkpoint
from core.loader.hub import resolve_model
from core.models.registry import build_model
from core.spec import BackendInfo, DeviceInfo, ModelSpec

__all__ = ["DoctorReport", "OperationRow", "WeightRow", "report", "report_operations"]

_ANY_BLOCK_SIZE = 128
"""Whether a cache's layout is private does not depend on the block size; the real one is known after `open`."""


@dataclass(frozen=True, kw_only=True)
class OperationRow:
    """One operation of the model.

    Args:
        operation: Name.
        spec: Name and static parameters, in one line.
        kind: NATIVE, COMPOSITE or NO.
        reason: Why not NATIVE.
        uses: How often the model binds it.
        part_of: The coarse operation that it is a part of; empty for those that the model itself asks for.
        activations: Format to which its kernel rounds activations; empty where it does not.
    """

    operation: str
    spec: str
    kind: str
    reason: str
    uses: int
    part_of: str = ""
    activations: str = ""


@dataclass(frozen=True, kw_only=True)
class WeightRow:
    """Weights that are stored alike and kept alike.

    Args:
        stored: Scheme in the checkpoint.
        kept: Scheme on the device; "none" is dense.
        count: How many.
        reason: Why they differ; empty where they do not.
    """

    stored: str
    kept: str
    count: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Everything that `core doctor` prints.

    Args:
        model: Its name, or the title of a list of operations.
        architecture: Of the model, or how many operations the list has.
        table_hash: Hash of the operation table; part of every conformance record.
        graphs: Which steps are recorded and replayed, or why none are.
        usable: Whether no operation is refused.
    """

    model: str
    architecture: str
    backend: str
    package: str
    arch: str
    dtype: str
    operations: tuple[OperationRow, ...]
    weights: tuple[WeightRow, ...]
    table_hash: str
    graphs: str
    usable: bool

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def report(config: EngineConfig, arch: str = "") -> DoctorReport:
    """Resolves every operation of a model on a device.

    Args:
        config: What to run, and where.
        arch: An architecture of the backend's, for a device that is not here; empty for the one that is.

    Raises:
        ModelNotFoundError, ModelLoadError: the model's files cannot be used.
        BackendNotFoundError, BackendUnavailableError: there is no such device.
    """
    place = _find(config, arch)
    with open_checkpoint(resolve_model(config.model, config.revision)) as checkpoint:
        binder = place.binder(config)
        ctx = build_context(config, binder, checkpoint, dry=True)
        model = build_model(checkpoint.config, ctx, plugins.list_models())
        place.check_block_size(config, model.spec)
        rule = graph_rule(place.backend, binder.table, enforce_eager=config.enforce_eager)  # the sampler is in no graph
        _resolve_sampler(ctx, model.spec.vocab_size)
        choices = Counter((choice.stored, choice.scheme, choice.reason) for choice in model.weight_schemes())
        weights = tuple(
            WeightRow(stored=stored, kept=kept, count=count, reason=reason)
            for (stored, kept, reason), count in choices.items()
        )
        return place.report(config.model, model.spec.architecture, ctx.dtype.value, binder, rule, weights)


def report_operations(config: EngineConfig, operations: OperationList, arch: str = "") -> DoctorReport:
    """Resolves operations that no model's file asks for.

    Args:
        config: Where; its model is not looked at.
        operations: What.
        arch: As for `report`.

    Raises:
        BackendNotFoundError, BackendUnavailableError: there is no such device.
    """
    place = _find(config, arch)
    binder = place.binder(config)
    for op in operations.operations:
        binder.table.add(binder.resolve(op))
    rule = graph_rule(place.backend, binder.table, enforce_eager=config.enforce_eager)
    what = f"{len(operations.operations)} operations"
    return place.report(operations.title, what, operations.dtype.value, binder, rule, ())


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A backend, not opened, and the device that is asked about."""

    backend: Backend
    info: BackendInfo
    package: str
    device: DeviceInfo

    def binder(self, config: EngineConfig) -> Binder:
        return Binder(self.backend, self.info, self.device, block_size=config.cache.block_size or _ANY_BLOCK_SIZE)

    def check_block_size(self, config: EngineConfig, spec: ModelSpec) -> None:
        """Lets a backend refuse the blocks that the operator wants."""
        for layer in dict.fromkeys(spec.layers):
            if layer is not None and config.cache.block_size is not None:
                self.backend.kv_layout(layer, config.cache.block_size)

    def report(
        self, model: str, what: str, dtype: str, binder: Binder, rule: GraphRule, weights: tuple[WeightRow, ...]
    ) -> DoctorReport:
        return DoctorReport(
            model=model,
            architecture=what,
            backend=f"{self.info.name}:{self.device.index}",
            package=self.package,
            arch=self.device.arch,
            dtype=dtype,
            operations=tuple(row for entry in binder.table.rows() for row in _rows(*entry)),
            weights=weights,
            table_hash=binder.table.hash,
            graphs=rule.describe(),
            usable=not binder.table.refused(),
        )


def _find(config: EngineConfig, arch: str) -> _Place:
    """The device of the configuration, or one that is not here: what is asked of a backend needs none."""
    if arch and config.device == "auto":
        raise ConfigError(f"--arch {arch} is an architecture of one backend; say of which with --device NAME")
    listing, index = plugins.choose_device(config.device)
    assert listing.info is not None
    backend = plugins.load_backend(listing.info)
    if arch:
        device = DeviceInfo(index=index, arch=arch, memory_bytes=0, sdk="not here")
    else:
        device = plugins.find_device(backend, listing.info, index, package=listing.package)
    return _Place(backend=backend, info=listing.info, package=listing.package, device=device)


def _resolve_sampler(ctx: BuildContext, vocab_size: int) -> None:
    for op in sample_ops(vocab_size, ctx.determinism):
        ctx.bind(op)


def _rows(row: Resolved, uses: int, part_of: str = "") -> list[OperationRow]:
    own = OperationRow(
        operation=row.op.name,
        spec=row.op.describe(),
        kind=row.kind.value,
        reason="" if row.kind is Kind.NATIVE else row.reason,
        uses=uses,
        part_of=part_of,
        activations=(row.verdict.activation_format or "") if row.kind is Kind.NATIVE else "",
    )
    return [own] + [part for child in row.parts for part in _rows(child, uses, row.op.name)]

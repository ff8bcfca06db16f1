"""`core backends` and `core doctor`: what this machine can run, and how."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from core.config import EngineConfig
from core.errors import ConfigError
from core.plugins import BackendListing, list_backends

if TYPE_CHECKING:
    from rich.table import Table

    from core.engine.doctor import DoctorReport

__all__ = ["show_backends", "show_doctor"]


def show_backends(*, as_json: bool) -> None:
    """Writes every installed backend with its devices, or with the error that keeps it from working."""
    listings = list_backends(probe=True)
    if as_json:
        _write_json([_listing(listing) for listing in listings])
        return
    if not listings:
        sys.stdout.write("no backend is installed; install one, for example `pip install core-backend-cpu`\n")
        return
    table = _table("backend", "package", "device", "architecture", "memory", "status")
    for listing in listings:
        for row in _rows(listing):
            table.add_row(*row)
    _print(table)


def _listing(listing: BackendListing) -> dict[str, Any]:
    info = listing.info
    return {
        "name": listing.name,
        "package": listing.package,
        "vendor": info.vendor if info else None,
        "api": list(info.api) if info else None,
        "priority": info.priority if info else None,
        "devices": [dataclasses.asdict(device) for device in listing.devices or ()],
        "error": listing.error,
        "passed_over": listing.passed_over,
    }


def _rows(listing: BackendListing) -> list[tuple[str, ...]]:
    if listing.error is not None:
        return [(listing.name, listing.package, "", "", "", listing.error)]
    if not listing.devices:
        remedy = listing.passed_over or (listing.info.remedy if listing.info else "")
        return [(listing.name, listing.package, "", "", "", f"no device; {remedy or 'check driver and SDK'}")]
    rows: list[tuple[str, ...]] = []
    for device in listing.devices:
        memory = f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else "unknown"
        name = f"{device.index} {device.name}".strip()
        rows.append((listing.name, listing.package, name, device.arch, memory, f"ok ({device.sdk})"))
    return rows


def show_doctor(config: EngineConfig, *, arch: str = "", ops: str = "", as_json: bool) -> None:
    """Writes how each operation of a model, or of a list, resolves on the device.

    Args:
        config: What to run, and where.
        arch: An architecture, for a device that is not here.
        ops: File with a list of operations, in place of a model.

    Raises:
        ConfigError: neither a model nor a list is given, or both are.
        typer.Exit: with code 2, after the table, where the device refuses an operation.
    """
    import typer

    if bool(config.model) == bool(ops):
        raise ConfigError("core doctor takes a model or a list of operations; give --model MODEL or --ops FILE")
    from core.engine.doctor import report, report_operations
    from core.engine.operation_list import read_operations

    found = report_operations(config, read_operations(Path(ops)), arch) if ops else report(config, arch)
    if as_json:
        _write_json(found.to_json())
    else:
        _print_doctor(found)
    if not found.usable:
        refused = [row for row in found.operations if row.kind == "NO"]
        first = f"{refused[0].operation}: {refused[0].reason}"
        sys.stderr.write(f"error: {found.backend} ({found.arch}) refuses {len(refused)} operation(s); {first}\n")
        raise typer.Exit(2)


def _print_doctor(found: DoctorReport) -> None:
    sys.stdout.write(
        f"{found.model} ({found.architecture}) on {found.backend} ({found.arch}, {found.package}), {found.dtype}\n"
    )
    operations = _table("operation", "kind", "uses", "why not NATIVE", "static parameters")
    for row in found.operations:
        name = f"  {row.operation}" if row.part_of else row.operation
        kind = f"{row.kind}, {row.activations}" if row.activations else row.kind
        operations.add_row(name, kind, str(row.uses), row.reason, row.spec.partition("(")[2].removesuffix(")"))
    _print(operations)
    if found.weights:
        weights = _table("weights", "stored as", "kept as", "why they differ")
        for weight in found.weights:
            weights.add_row(str(weight.count), _dense(weight.stored), _dense(weight.kept), weight.reason)
        _print(weights)
    verdict = "every operation can be done" if found.usable else "the device refuses what is marked NO"
    sys.stdout.write(f"{verdict}; {found.graphs}; table {found.table_hash}\n")


def _dense(scheme: str) -> str:
    return "dense" if scheme == "none" else scheme


def _write_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=400)  # a pipe has no width; nothing is to be wrapped
    console.print(table)

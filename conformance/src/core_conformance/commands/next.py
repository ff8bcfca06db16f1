"""`core conformance next`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from core_conformance.advice.next_operation import Advice

__all__ = ["next_"]

_SHOWN_SPECS = 4


def next_(
    backend: Annotated[str, typer.Option("--backend", help="NAME or NAME:INDEX; `reference` is the core's own torch.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="A folder, a GGUF file or a name, in place of a small model with random weights."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Say which operation to write next: the COMPOSITE one that takes most of a step, measured on the device."""
    from core_conformance.advice.next_operation import advise
    from core_conformance.advice.step_times import measure
    from core_conformance.advice.vendor_lines import vendor_lines
    from core_conformance.target import load_target

    target = load_target(backend)
    with _model_path(model) as path:
        times = measure(target, path)
    advice, lines = advise(times), vendor_lines(target.info)
    where = {"backend": f"{target.name}:{target.index}", "package": target.package, "arch": target.device.arch}
    what = {"model": model or "random weights of a small decoder", "dtype": times.dtype, "vendor_lines": lines}
    if as_json:
        typer.echo(json.dumps({**where, **what, **advice.to_json()}, indent=2))
        return
    typer.echo(f"{where['backend']} ({where['arch']}), {what['model']}, {times.dtype}; {target.package}: {lines} lines")
    typer.echo("\n".join(["", *_table(advice), "", *_told(advice, backend)]))


@contextmanager
def _model_path(model: str | None) -> Iterator[Path]:
    """The model's files; those of the small model are there for as long as the context lasts."""
    from core.loader.hub import resolve_model
    from core_conformance.advice.step_model import write_step_model

    if model is not None:
        yield Path(resolve_model(model))
        return
    with tempfile.TemporaryDirectory(prefix="core-conformance-") as folder:
        yield write_step_model(Path(folder))


def _table(advice: Advice) -> Iterator[str]:
    """One line an operation, columns aligned."""
    wide = max(len(row.operation) for row in advice.operations)
    yield f"{'operation':<{wide}}  {'kind':<9}  {'decode step':>13}  {'prefill step':>13}"
    for row in advice.operations:
        decode, prefill = _cell(row.decode, row.decode_calls), _cell(row.prefill, row.prefill_calls)
        parts = f"  besides its parts {', '.join(row.parts)}" if row.parts else ""
        yield f"{row.operation:<{wide}}  {row.kind:<9}  {decode:>13}  {prefill:>13}{parts}"
    outside = f"{advice.outside_decode:.1%}", f"{advice.outside_prefill:.1%}"
    yield f"{'outside of operations':<{wide + 11}}  {outside[0]:>6}{'':7}  {outside[1]:>6}"


def _cell(share: float, calls: float) -> str:
    return f"{share:6.1%}  {f'x{calls:.0f}':>5}"


def _told(advice: Advice, backend: str) -> Iterator[str]:
    """What to write, with the shapes that matter first."""
    if advice.next is None:
        yield "everything is NATIVE"
        return
    row = advice.next
    yield f"write next: {row.operation}, {row.decode:.0%} of a decode step and {row.prefill:.0%} of a prefill step"
    for spec in row.specs[:_SHOWN_SPECS]:
        yield f"    {spec.spec}: {spec.decode:.1%} and {spec.prefill:.1%}; {spec.reason}"
    if len(row.specs) > _SHOWN_SPECS:
        yield f"    and {len(row.specs) - _SHOWN_SPECS} more, which take less"
    yield f"what it must do: docs/interface.md#{row.operation}, also printed by `python -m core_conformance.interface`"
    yield f"prove it: core conformance run --backend {backend} --level L1 -k {row.operation}"

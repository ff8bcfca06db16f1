"""`core conformance list`."""

from __future__ import annotations

from typing import Annotated

import typer

from core_conformance.commands.selection import AnyLevel, selector

__all__ = ["list_"]


def list_(level: AnyLevel = "L3", k: Annotated[str, typer.Option("-k", help="As in run.")] = "") -> None:
    """List the ids of every level up to one."""
    from core.errors import ConfigError
    from core_conformance.must_pass_lists import levels_up_to, must_pass

    found = list(filter(selector(k), must_pass(levels_up_to(level))))
    if not found:
        raise ConfigError(f"no id up to {level} holds or matches {k!r}; leave -k out to see all of them")
    for check_id in found:
        typer.echo(check_id)

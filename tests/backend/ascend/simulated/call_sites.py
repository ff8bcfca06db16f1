"""Calls of torch_npu in Python sources, and what is wrong with each by the operator's schemas."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Site", "complaints", "sites"]


@dataclass(frozen=True)
class Site:
    """One call.

    Args:
        where: File and line.
        name: Of the operator.
        positional: Arguments without a name.
        named: Names of the others; those that come in a `**mapping` are not seen.
        open_ended: Whether there is a mapping.
    """

    where: str
    name: str
    positional: int
    named: tuple[str, ...]
    open_ended: bool


def sites(source: str, file: str) -> list[Site]:
    """Calls of a method whose name begins with npu_ or _npu_ in a source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr.startswith(("npu_", "_npu_")):
            named = tuple(word.arg for word in node.keywords if word.arg is not None)
            open_ended = any(word.arg is None for word in node.keywords)
            found.append(Site(f"{file}:{node.lineno}", node.func.attr, len(node.args), named, open_ended))
    return found


def complaints(site: Site) -> list[str]:
    """What keeps the call from matching any overload; empty where it matches one."""
    packet = _packet(site.name)
    if packet is None:
        return [f"{site.where}: torch_npu has no {site.name}"]
    reasons = [_mismatch(site, getattr(packet, overload)._schema) for overload in packet.overloads()]
    return [] if "" in reasons else [f"{site.where}: {site.name}: {'; '.join(reasons)}"]


def _packet(name: str) -> Any:
    for space in (torch.ops.npu, torch.ops.atb):
        try:
            return getattr(space, name)
        except AttributeError:
            continue
    return None


def _mismatch(site: Site, schema: Any) -> str:
    arguments = {argument.name: argument for argument in schema.arguments}
    unknown = [name for name in site.named if name not in arguments]
    if unknown:
        return f"no argument {', '.join(unknown)}"
    places = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    if site.positional > len(places):
        return f"{site.positional} positional arguments, at most {len(places)}"
    given = set(places[: site.positional])
    twice = given & set(site.named)
    if twice:
        return f"{', '.join(sorted(twice))} given twice"
    needed = {a.name for a in schema.arguments if not a.has_default_value()} - given - set(site.named)
    return f"{', '.join(sorted(needed))} missing" if needed and not site.open_ended else ""

"""docs/interface.md, made from the docstrings: `python -m core_conformance.interface > docs/interface.md`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.backend import Backend
from core.backend.ops import OPERATIONS, OpSpec
from core.spec import CONTRACT_VERSION

__all__ = ["ContractSize", "conformance_ids", "contract_size", "render"]

_MUST = ("probe", "open", "supports", "bind")
"""In the order in which they are read; `contract_size` counts what the class itself demands."""
_HEAD = """# The interface of a backend

Contract {version}. Made from the docstrings of `core.backend` by

    python -m core_conformance.interface > docs/interface.md

A test checks that it is current. [writing-a-backend.md](writing-a-backend.md) is the way in;
[conformance.md](conformance.md) says what the ids mean.
"""


@dataclass(frozen=True, kw_only=True)
class ContractSize:
    """How much there is in the contract.

    Args:
        required: Methods that a vendor must write.
        defaulted: Methods with a default.
        num_operations: Operations.
        num_parameters: Static parameters of all operations, those that every one has counted once.
        num_record_fields: Run-time fields of all operations' records.
        num_optional: Those of them that belong to a feature.
    """

    required: frozenset[str]
    defaulted: frozenset[str]
    num_operations: int
    num_parameters: int
    num_record_fields: int
    num_optional: int

    @property
    def num_methods(self) -> int:
        """Required and defaulted ones."""
        return len(self.required) + len(self.defaulted)

    def __str__(self) -> str:
        return (
            f"{len(self.required)} required methods, {len(self.defaulted)} with a default; "
            f"{self.num_operations} operations with {self.num_parameters} static parameters and "
            f"{self.num_record_fields} run-time fields, of which {self.num_optional} belong to features"
        )


def contract_size() -> ContractSize:
    """The size of the contract that this core speaks."""
    required = frozenset(Backend.__abstractmethods__)
    shared = {field.name for field in dataclasses.fields(OpSpec)}
    own = [field for op in OPERATIONS.values() for field in dataclasses.fields(op) if field.name not in shared]
    record = [field for op in OPERATIONS.values() for field in dataclasses.fields(op.args)]
    return ContractSize(
        required=required,
        defaulted=frozenset(_methods()) - required,
        num_operations=len(OPERATIONS),
        num_parameters=len(shared) + len(own),
        num_record_fields=len(record),
        num_optional=sum("feature" in field.metadata for field in record),
    )


def render() -> str:
    """The whole document, ending in a newline."""
    version = ".".join(map(str, CONTRACT_VERSION))
    lines = [_HEAD.format(version=version), "## Methods", ""]
    lines += ["A backend must write " + ", ".join(f"`{name}`" for name in _MUST) + "; the others have defaults.", ""]
    lines += [f"Its size: {contract_size()}.", ""]
    for name in _methods():
        lines += list(_method(name))
    lines += ["## Operations", "", _shared_fields(), ""]
    for name in sorted(OPERATIONS):
        lines += list(_operation(OPERATIONS[name]))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def conformance_ids() -> dict[str, list[str]]:
    """Method of the contract to the ids of checks that its docstring names."""
    found = {}
    for name in _methods():
        text = inspect.getdoc(getattr(Backend, name)) or ""
        match = re.search(r"^Conformance: (.+)$", text, re.MULTILINE)
        found[name] = [item.strip() for item in match.group(1).split(",")] if match else []
    return found


def _methods() -> list[str]:
    public = [name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")]
    order = {name: inspect.getsourcelines(getattr(Backend, name))[1] for name in public}
    return sorted(public, key=order.__getitem__)


def _method(name: str) -> Iterator[str]:
    function = getattr(Backend, name)
    yield f"### `{name}{_signature(function)}`"
    yield ""
    yield from _paragraphs(inspect.getdoc(function) or "")


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.name != "self"]
    return re.sub(r"'", "", str(signature.replace(parameters=kept)))


def _operation(op: type[OpSpec]) -> Iterator[str]:
    yield f"### `{op.name}`"
    yield ""
    yield from _paragraphs(inspect.getdoc(op) or "")
    own = [f for f in dataclasses.fields(op) if f.name not in {g.name for g in dataclasses.fields(OpSpec)}]
    yield f"`{op.__name__}`: " + (", ".join(_static(f) for f in own) or "no parameters of its own") + "."
    yield ""
    yield f"`{op.args.__name__}`, what the bound callable gets:"
    yield ""
    yield "| field | type | feature | |"
    yield "|---|---|---|---|"
    told = _told_arguments(inspect.getdoc(op.args) or "")
    for field in dataclasses.fields(op.args):
        feature = field.metadata.get("feature", "")
        kind = str(field.type).replace("|", "\\|")
        text = told.get(field.name, "").replace("|", "\\|")
        yield f"| `{field.name}` | `{kind}` | {feature} | {text} |"
    yield ""


def _static(field: dataclasses.Field[Any]) -> str:
    kind = str(field.type)
    return (
        f"`{field.name}: {kind}`"
        if field.default is dataclasses.MISSING
        else f"`{field.name}: {kind} = {field.default!r}`"
    )


def _shared_fields() -> str:
    doc = inspect.getdoc(OpSpec) or ""
    told = "; ".join(f"`{name}` ({text.rstrip('.')})" for name, text in _told_arguments(doc).items())
    return (
        f"Every OpSpec has {told}. A field of a record that belongs to a feature is None unless the OpSpec names the "
        "feature. T stands for packed tokens, R for requests; index tensors are int32 on the device."
    )


def _told_arguments(doc: str) -> dict[str, str]:
    """Name to text of a docstring's `Args:` section."""
    match = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", doc, re.MULTILINE)
    found: dict[str, str] = {}
    name = ""
    for line in (match.group(1) if match else "").splitlines():
        entry = re.match(r"^ {4}(\w+): (.*)$", line)
        if entry:
            name = entry.group(1)
            found[name] = entry.group(2)
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found


def _paragraphs(doc: str) -> Iterator[str]:
    """A docstring as Markdown: sections become lists, other text stays."""
    section = False
    for line in doc.splitlines():
        if line in ("Args:", "Returns:", "Raises:"):
            section = True
            yield ""
            yield f"{line[:-1]}:"
            yield ""
        elif section and re.match(r"^ {4}\S", line):
            yield f"- {line.strip()}"
        elif section and line.startswith(" " * 8):
            yield f"  {line.strip()}"
        else:
            section = section and not line
            yield line
    yield ""


if __name__ == "__main__":
    sys.stdout.write(render())

"""What a report says of the run itself: versions, device, packages, time and place."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from core.spec import CONTRACT_VERSION, BackendInfo, DeviceInfo
from core_conformance.records import Mode
from core_conformance.report.provenance import Package, inspect_package
from core_conformance.waivers import Waiver

__all__ = ["RunFacts", "gather_facts", "suite_hash"]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What ran, on what, when and from where.

    Args:
        backend: Name of the backend.
        device: As `probe()` saw it.
        mode: What counts of the records.
        levels: Levels asked for.
        selection: The text of `-k`; empty where everything was asked for.
        shard: Which part of a run this is ("2/3"); empty where it is the whole.
        models: Models asked for; empty for all of the suite's.
        waivers: Those that the run was given.
        core: core-inference.
        suite: core-conformance.
        package: The distribution that brings the backend.
        suite_hash: SHA-256 over the suite's files and lists.
        contract: Version of the contract that the core speaks.
        torch: Version of torch.
        python: Version of Python.
        machine: Processor and system of the host.
        date: When it began, UTC, ISO 8601.
        seconds: How long it took.
    """

    backend: str
    device: DeviceInfo
    mode: Mode
    levels: tuple[str, ...]
    selection: str = ""
    shard: str = ""
    models: tuple[str, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    core: Package
    suite: Package
    package: Package
    suite_hash: str
    contract: str
    torch: str
    python: str
    machine: str
    date: str
    seconds: float = 0.0

    @property
    def packages(self) -> dict[str, Package]:
        """Core, suite and backend package by the name of the distribution, each once."""
        return {package.name: package for package in (self.core, self.suite, self.package)}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        made = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        packages = {name: made[name].to_dict() for name in ("core", "suite", "package")}
        waivers = [waiver.to_dict() for waiver in self.waivers]
        return {
            **made,
            **packages,
            "device": dataclasses.asdict(self.device),
            "mode": str(self.mode),
            "levels": list(self.levels),
            "models": list(self.models),
            "waivers": waivers,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunFacts:
        """The facts of `to_dict`; fields that this version does not know are left out."""
        known = {item.name for item in dataclasses.fields(cls)}
        kept = {name: value for name, value in data.items() if name in known}
        packages = {name: Package.from_dict(kept[name]) for name in ("core", "suite", "package")}
        return cls(
            **{
                **kept,
                **packages,
                "device": DeviceInfo(**kept["device"]),
                "mode": Mode(kept["mode"]),
                "levels": tuple(kept["levels"]),
                "models": tuple(kept["models"]),
                "waivers": tuple(Waiver.from_dict(waiver) for waiver in kept["waivers"]),
            }
        )


def gather_facts(
    info: BackendInfo,
    device: DeviceInfo,
    *,
    package: str,
    levels: Sequence[str],
    selection: str = "",
    shard: str = "",
    models: Sequence[str] = (),
    waivers: Sequence[Waiver] = (),
    date: datetime.datetime | None = None,
    seconds: float = 0.0,
) -> RunFacts:
    """The facts of a run in this environment; imports no torch.

    Args:
        info: How the backend announces itself.
        device: As `probe()` saw it.
        package: Distribution that brings it, perhaps with its version behind a space.
        levels: Levels asked for.
        selection: The text of `-k`.
        shard: Which part of a run this is.
        models: Models asked for.
        waivers: Those that the run was given.
        date: When it began; now by default.
        seconds: How long it took.
    """
    name, module = package.split(" ")[0], info.load.partition(":")[0].partition(".")[0]
    core, suite = _inspect("core-inference", "core"), _inspect("core-conformance", "core_conformance")
    own = {each.name: each for each in (core, suite)}.get(name) or _inspect(name or module, module)
    begun = date or datetime.datetime.now(datetime.UTC)
    return RunFacts(
        backend=info.name,
        device=device,
        mode=Mode.SIMULATED if device.simulated else Mode.VALIDATED,
        levels=tuple(levels),
        selection=selection,
        shard=shard,
        models=tuple(models),
        waivers=tuple(waivers),
        core=core,
        suite=suite,
        package=own,
        suite_hash=suite_hash(),
        contract=".".join(map(str, CONTRACT_VERSION)),
        torch=_version("torch"),
        python=platform.python_version(),
        machine=f"{platform.machine()} {platform.system()}",
        date=begun.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
    )


def suite_hash() -> str:
    """SHA-256, 64 hex digits, over every Python file of the suite and its lists."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".txt")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


_inspect = functools.cache(inspect_package)
"""Once a process: a test session runs the suite a hundred times."""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

"""Discovery of backends: lists entry points, isolates broken packages, opens the one device asked for.

Besides `core.hookspecs` the only file that imports pluggy.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

import pluggy

from core import hookspecs
from core.errors import BackendNotFoundError, BackendUnavailableError, ConfigError, ContractVersionError
from core.spec import BackendInfo, ConformanceCase, DeviceInfo, ModelEntry

if TYPE_CHECKING:
    # Only for types: a process that lists or chooses devices must not pay for importing torch.
    from core.backend.base import Backend, OpenConfig

__all__ = [
    "BackendListing",
    "OpenedBackend",
    "choose_device",
    "find_device",
    "list_backends",
    "list_conformance_cases",
    "list_models",
    "load_backend",
    "open_device",
    "probe_devices",
]

logger = logging.getLogger("core.plugins")

PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class BackendListing:
    """One backend, or one package that could not say what it brings.

    Args:
        package: Distribution that announced it, with its version.
        info: What it announced; None where the package failed.
        error: Why it cannot be used: the package's own exception, or a contract version that does not fit.
        devices: What `probe()` found; None where nobody asked.
        passed_over: What `probe()` warned of: why it lists no device, or not all.
    """

    package: str
    info: BackendInfo | None = None
    error: str | None = None
    devices: tuple[DeviceInfo, ...] | None = None
    passed_over: str = ""

    @property
    def name(self) -> str:
        """The word after `--device`, or the package's name where it failed."""
        return self.info.name if self.info else self.package


@dataclass(frozen=True, kw_only=True)
class OpenedBackend:
    """A backend that has taken a device."""

    backend: Backend
    info: BackendInfo
    device: DeviceInfo
    package: str = field(default="")


def list_backends(*, probe: bool = False) -> list[BackendListing]:
    """Every installed backend, best first; a package that raises is listed with its error and the host lives.

    Args:
        probe: Also ask each for its devices, in a process of its own: SDKs break imports and overwrite packages.
    """
    listings = [listing for entry in _entry_points() for listing in _ask(entry)]
    listings = _refuse_duplicates(listings)
    if probe:
        with ThreadPoolExecutor() as pool:  # each is a process of its own that imports for seconds
            listings = list(pool.map(_with_devices, listings))
    return sorted(listings, key=lambda item: (item.info is None, -(item.info.priority if item.info else 0), item.name))


def list_models() -> list[ModelEntry]:
    """Architectures that installed packages bring besides the core's own; broken packages bring none."""
    found: list[ModelEntry] = []
    for entry in _entry_points():
        manager, error = _register(entry)
        if error is None:
            found += [model for models in manager.hook.core_models() for model in models]
    return found


def list_conformance_cases(backend: str) -> list[ConformanceCase]:
    """Further checks that the packages which announce this backend bring for it; a broken package brings none."""
    found: list[ConformanceCase] = []
    for entry in _entry_points():
        manager, error = _register(entry)
        if error is None and any(info.name == backend for infos in manager.hook.core_backends() for info in infos):
            found += [case for cases in manager.hook.core_conformance_cases(backend=backend) for case in cases]
    return found


def load_backend(info: BackendInfo) -> Backend:
    """Imports the backend's class and makes an instance, not opened.

    Raises:
        BackendUnavailableError: the import failed; the message holds its error.
        ContractVersionError: the plugin speaks another contract.
    """
    conflict = info.version_conflict()
    if conflict:
        raise ContractVersionError(conflict)
    module, _, attribute = info.load.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise BackendUnavailableError(
            f"backend {info.name!r} cannot be imported from {info.load}: {type(error).__name__}: {error}; "
            f"{info.remedy or 'reinstall its package'}"
        ) from error
    return cast("Backend", made)


def choose_device(device: str) -> tuple[BackendListing, int]:
    """The backend and device index meant by `--device`: "auto", "name" or "name:index".

    "auto" takes the usable backend of the highest priority that finds a device; negative priorities are never taken.

    Raises:
        BackendNotFoundError: nothing of that name is installed.
        BackendUnavailableError: it is installed and broken.
        ConfigError: the word is malformed.
    """
    name, colon, index = device.partition(":")
    if not name or (colon and not index.isdecimal()):
        raise ConfigError(f"--device {device!r} is malformed; write auto, NAME or NAME:INDEX")
    listings = list_backends()
    if name == "auto":
        return _best(listings), int(index or 0)
    for listing in listings:
        if listing.name == name:
            _require_usable(listing)
            return listing, int(index or 0)
    raise BackendNotFoundError(_not_found(name, listings))


def open_device(device: str, config: OpenConfig) -> OpenedBackend:
    """Chooses, loads and opens a device in this process.

    Raises:
        BackendNotFoundError: no such backend is installed.
        BackendUnavailableError: it finds no such device, or cannot take it.
    """
    listing, index = choose_device(device)
    info = listing.info
    assert info is not None
    backend = load_backend(info)
    found = find_device(backend, info, index, package=listing.package)
    backend.open(index, config)
    return OpenedBackend(backend=backend, info=info, device=found, package=listing.package)


def probe_devices(backend: Backend) -> tuple[list[DeviceInfo], str]:
    """The devices of a backend, and what it warned of meanwhile: why it passes over others.

    The warnings are the caller's to show: on their way to the log they would be said twice.
    """
    warnings, root = _Warnings(), logging.getLogger()
    others, root.handlers = root.handlers, [warnings]
    try:
        return backend.probe(), "; ".join(warnings.lines)
    finally:
        root.handlers = others


def find_device(backend: Backend, info: BackendInfo, index: int, *, package: str = "") -> DeviceInfo:
    """Device `index` of a backend, as `probe()` sees it.

    Raises:
        BackendUnavailableError: there is none; the message says why as far as the backend knows, and what to do.
    """
    devices, warned = probe_devices(backend)
    if index < len(devices):
        if warned:
            logger.warning("backend %r: %s", info.name, warned)
        return devices[index]
    found = f"only {len(devices)} device(s), number {index} was asked for" if devices else "no device"
    remedy = warned or (f"the last index is {len(devices) - 1}" if devices else info.remedy or "check driver and SDK")
    raise BackendUnavailableError(
        f"backend {info.name!r}{f' ({package})' if package else ''} is installed and finds {found}; {remedy}"
    )


class _Warnings(logging.Handler):
    """Keeps the lines of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _entry_points() -> Iterator[EntryPoint]:
    yield from sorted(entry_points(group=hookspecs.ENTRY_POINT_GROUP), key=lambda entry: entry.name)


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def _register(entry: EntryPoint) -> tuple[pluggy.PluginManager, str | None]:
    """A manager with just this package's plugin, so that one that breaks takes nobody with it."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(entry.load(), name=entry.name)
        manager.check_pending()
    except Exception as error:
        return manager, f"{type(error).__name__}: {error}"
    return manager, None


def _ask(entry: EntryPoint) -> list[BackendListing]:
    package = _package(entry)
    manager, error = _register(entry)
    if error is not None:
        return [BackendListing(package=package, error=error)]
    try:
        infos = [info for answer in manager.hook.core_backends() for info in answer]
        return [BackendListing(package=package, info=info, error=info.version_conflict() or None) for info in infos]
    except Exception as failure:
        return [BackendListing(package=package, error=f"core_backends(): {type(failure).__name__}: {failure}")]


def _refuse_duplicates(listings: Sequence[BackendListing]) -> list[BackendListing]:
    """Two packages of one name: neither is taken silently."""
    owners: dict[str, list[str]] = {}
    for listing in listings:
        if listing.info:
            owners.setdefault(listing.info.name, []).append(listing.package)
    for name, packages in owners.items():
        if len(packages) > 1:
            error = f"{name!r} is announced by {' and '.join(packages)}; uninstall all but one"
            listings = [replace(item, error=error) if item.name == name else item for item in listings]
    return list(listings)


def _with_devices(listing: BackendListing) -> BackendListing:
    if listing.info is None or listing.error is not None:
        return listing
    return _probe_apart(listing, listing.info)


_PROBE = """
import dataclasses, importlib, json, sys
from core.plugins import probe_devices
module, _, attribute = sys.argv[1].partition(":")
devices, warned = probe_devices(getattr(importlib.import_module(module), attribute)())
print("devices:" + json.dumps([[dataclasses.asdict(device) for device in devices], warned]))
"""


def _probe_apart(listing: BackendListing, info: BackendInfo) -> BackendListing:
    """The listing with what `probe()` says in a fresh interpreter with the backend's environment."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, info.load],
            env={**os.environ, **info.env},
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return replace(listing, error=f"probe() gave no answer within {PROBE_TIMEOUT_S:.0f} s")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("devices:"):
            found, warned = json.loads(line.removeprefix("devices:"))
            devices: list[dict[str, Any]] = found
            return replace(listing, devices=tuple(DeviceInfo(**device) for device in devices), passed_over=warned)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return replace(listing, error=f"probe() failed: {last}")


def _best(listings: Sequence[BackendListing]) -> BackendListing:
    candidates = [item for item in listings if item.info and not item.error and item.info.priority >= 0]
    for listing in candidates[:-1]:
        found = _with_devices(listing)
        if found.devices:
            return found
    if candidates:
        return candidates[-1]
    broken = "; ".join(f"{item.package}: {item.error}" for item in listings if item.error)
    raise BackendNotFoundError(
        f"no usable backend is installed{f' ({broken})' if broken else ''}; install one, for example "
        "`pip install core-backend-cpu` (from a clone `pip install ./backends/cpu`)"
    )


def _require_usable(listing: BackendListing) -> None:
    if listing.error is not None:
        # What was found out of an announced backend (another contract, a name that is taken) says itself what to do.
        remedy = "" if listing.info else "; reinstall or upgrade it"
        raise BackendUnavailableError(
            f"backend {listing.name!r} ({listing.package}) cannot be used: {listing.error}{remedy}"
        )


def _not_found(name: str, listings: Sequence[BackendListing]) -> str:
    installed = ", ".join(item.name for item in listings if item.info) or "none"
    broken = [f"{item.package} ({item.error})" for item in listings if item.error and not item.info]
    hint = f"; broken packages that may have brought it: {', '.join(broken)}" if broken else ""
    return (
        f"no installed backend is called {name!r} (installed: {installed}){hint}; "
        f"install the package that brings it, by convention `pip install core-backend-{name}`, "
        "after which `core backends` lists it with its devices"
    )

"""Where an installed package comes from, what is in it, and whether somebody changed it since.

A wheel says in its RECORD what each file's hash was when it was built. A checkout says in its commit. Anything else
says nothing, and nothing can be certified of it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

__all__ = ["Package", "inspect_package"]

Source = Literal["wheel", "checkout", "files", "none"]

# Written by the installer, and different on each machine.
_NOT_CONTENT = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")


@dataclass(frozen=True, kw_only=True)
class Package:
    """One installed distribution.

    Args:
        name: Of the distribution.
        module: Its top-level module.
        version: Of the distribution.
        digest: SHA-256, 64 hex digits, over path and content of every file; the same for each install of one wheel.
        source: "wheel" installed from one; "checkout" files of a git work tree; "files" neither; "none" not installed.
        revision: Commit of a checkout.
        dirty: Whether the checkout has uncommitted changes.
        edited: Files that are not as RECORD says, or that it does not name.
    """

    name: str
    module: str
    version: str
    digest: str
    source: Source
    revision: str = ""
    dirty: bool = False
    edited: tuple[str, ...] = ()

    @property
    def objection(self) -> str:
        """Why nothing can be certified of it; empty where something can."""
        if self.source == "none":
            return f"no distribution brings {self.name}; install it from a wheel"
        if self.edited:
            return f"{self.name} was edited after it was installed ({', '.join(self.edited[:3])}); reinstall its wheel"
        if self.source == "files":
            return f"{self.name} is neither installed from a wheel nor in a git checkout; build and install its wheel"
        if self.dirty:
            return f"the checkout of {self.name} has uncommitted changes; commit them, or install its wheel"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "edited": list(self.edited)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Package:
        """The package of `to_dict`."""
        return cls(**{**data, "edited": tuple(data["edited"])})


def inspect_package(name: str, module: str, *, path: Sequence[str] | None = None) -> Package:
    """What is installed under the distribution's name.

    Args:
        name: Of the distribution.
        module: Its top-level module.
        path: Folders to look in, instead of `sys.path`.
    """
    places = list(sys.path if path is None else path)
    found = next(iter(importlib.metadata.distributions(name=name, path=places)), None)
    if found is None:
        return Package(name=name, module=module, version="", digest=_digest({}), source="none")
    recorded = dict(_recorded(found))
    if not _editable(found):
        hashes, edited = _compare(found, recorded, module)
        return Package(
            name=name,
            module=module,
            version=found.version,
            digest=_digest(hashes),
            source="wheel",
            edited=tuple(sorted(edited)),
        )
    folder = _module_folder(module)
    hashes = {**recorded, **({} if folder is None else _hash_tree(folder))}
    revision, dirty = ("", False) if folder is None else _git_state(folder)
    source: Source = "checkout" if revision else "files"
    return Package(
        name=name,
        module=module,
        version=found.version,
        digest=_digest(hashes),
        source=source,
        revision=revision,
        dirty=dirty,
    )


def _recorded(found: importlib.metadata.Distribution) -> Iterator[tuple[str, str]]:
    """(path, hex SHA-256) of each file of the wheel; scripts hold the interpreter's path and are left out."""
    for file in found.files or ():
        outside = file.parts[0] == ".." or file.is_absolute()
        if file.hash is None or file.hash.mode != "sha256" or outside or file.name in _NOT_CONTENT:
            continue
        padded = file.hash.value + "=" * (-len(file.hash.value) % 4)
        yield file.as_posix(), base64.urlsafe_b64decode(padded).hex()


def _compare(
    found: importlib.metadata.Distribution, recorded: Mapping[str, str], module: str
) -> tuple[dict[str, str], set[str]]:
    """Hashes of the files as they are, and names of those that differ from RECORD or are not in it."""
    hashes: dict[str, str] = {}
    for name in recorded:
        place = Path(str(found.locate_file(name)))
        hashes[name] = _hash_file(place) if place.is_file() else "missing"
    folder = Path(str(found.locate_file(module)))
    if folder.is_dir():
        hashes |= _hash_tree(folder)
    return hashes, {name for name, value in hashes.items() if recorded.get(name) != value}


def _editable(found: importlib.metadata.Distribution) -> bool:
    text = found.read_text("direct_url.json")
    return bool(text) and bool(json.loads(text or "{}").get("dir_info", {}).get("editable"))


def _module_folder(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def _hash_tree(folder: Path) -> dict[str, str]:
    """Every file below a module's folder by its path from beside it; what Python itself caches is left out."""
    files = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".pyc")
    return {(PurePosixPath(folder.name) / p.relative_to(folder).as_posix()).as_posix(): _hash_file(p) for p in files}


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(hashes: Mapping[str, str]) -> str:
    lines = (f"{name}\0{value}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _git_state(folder: Path) -> tuple[str, bool]:
    """Commit, and whether the work tree has uncommitted changes; ("", False) where git does not track the folder."""
    if not _git(folder, "ls-files", "--", "*.py"):
        return "", False
    return _git(folder, "rev-parse", "HEAD"), bool(_git(folder, "status", "--porcelain"))


def _git(folder: Path, *args: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""`core new-backend`: a complete package for a new chip, ready to be installed and proved."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from core.errors import ConfigError

__all__ = ["BackendNames", "create_backend", "write_backend"]

RESERVED = frozenset({"auto", "all", "backend", "conformance", "core", "inference", "none", "reference"})
"""Words that mean something else after `--device`, or whose package would be one of the project's own."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TORCH_DEVICE = re.compile(r"[a-z][a-z0-9_]*")
_LONGEST_NAME = 32
_TEMPLATE = "backend_template"
_SUFFIX = ".tmpl"
_HIDDEN = {"gitignore": ".gitignore", "github": ".github"}
"""Names that would be left out of a wheel were they stored with their point."""


@dataclass(frozen=True)
class BackendNames:
    """What everything in the package of one backend is called.

    Args:
        name: The word after `--device`: "my-chip".
    """

    name: str

    @property
    def distribution(self) -> str:
        """What pip installs, and the package's folder."""
        return f"core-backend-{self.name}"

    @property
    def module(self) -> str:
        """What Python imports."""
        return f"core_{self.name.replace('-', '_')}"

    @property
    def class_name(self) -> str:
        """The Backend subclass."""
        return f"{''.join(word.capitalize() for word in self.name.split('-'))}Backend"


def create_backend(name: str, folder: Path, torch_device: str, *, force: bool) -> None:
    """Checks the name, writes the package into a new folder below `folder` and says what to do with it.

    Raises:
        ConfigError: the name or the device's word is malformed, reserved or taken, or the folder has files already.
    """
    names = _checked(name, force)
    if len(torch_device) > _LONGEST_NAME or not _TORCH_DEVICE.fullmatch(torch_device):
        raise ConfigError(
            f"--torch-device {torch_device!r} is no device of torch; give the word that torch.device() takes, "
            "without an index, for example cpu"
        )
    target = folder / names.distribution
    if not force and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{str(target)!r} exists already; choose another --dir, or overwrite its files with --force")
    written = write_backend(names, target, torch_device)
    place = shlex.quote(str(target if target.is_absolute() else Path(".") / target))
    place = place if target.is_absolute() or place.startswith(("'", "./", "..")) else f"./{place}"
    sys.stdout.write(
        f"{len(written)} files are written to {target}\n\n"
        f"    pip install -e {place}\n"
        "    core backends\n"
        f"    core conformance run --backend {names.name} --level L0\n\n"
        "Every operation is composed by the core until the package has a kernel for it; what to write first, says\n\n"
        f"    core conformance next --backend {names.name}\n"
    )


def write_backend(names: BackendNames, target: Path, torch_device: str) -> list[Path]:
    """Writes the package's files, replacing those of the same name, and gives their paths.

    Args:
        names: What things are called.
        target: The package's folder; made where it is missing.
        torch_device: The word that `torch.device()` takes for the chip.

    Raises:
        ConfigError: a file cannot be written.
    """
    written = []
    for path, text in _rendered(names, torch_device).items():
        place = target / path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{str(place)!r} cannot be written: {error.strerror}; choose another --dir") from None
        written.append(place)
    return written


def _checked(name: str, force: bool) -> BackendNames:
    if not _NAME.fullmatch(name):
        wish = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        advice = f"for example {wish!r}" if _NAME.fullmatch(wish) else "for example 'my-chip'"
        raise ConfigError(
            f"NAME {name!r} must be lower-case letters and digits, words joined by single hyphens, and begin with a "
            f"letter; write {advice}"
        )
    if len(name) > _LONGEST_NAME:
        raise ConfigError(f"NAME {name!r} has {len(name)} characters; give at most {_LONGEST_NAME}")
    if name in RESERVED:
        raise ConfigError(f"NAME {name!r} is reserved; choose another one")
    names = BackendNames(name)
    owner = _owner(names, but=names.distribution if force else "")
    if owner:
        raise ConfigError(f"NAME {name!r} is taken by {owner}; choose another one, or uninstall that first")
    return names


def _owner(names: BackendNames, *, but: str) -> str:
    """What uses the name in this environment already, the distribution `but` not counted; empty where nothing does."""
    from core.plugins import list_backends

    for listing in list_backends():
        distribution = listing.package.partition(" ")[0]
        if distribution == but:
            return ""
        if listing.name == names.name or distribution == names.distribution:
            return f"the installed package {listing.package}"
    if importlib.util.find_spec(names.module) is not None:
        return f"the installed module {names.module}"
    return ""


def _rendered(names: BackendNames, torch_device: str) -> dict[Path, str]:
    """Path inside the package to text, sorted."""
    found: dict[Path, str] = {}
    _collect(files("core.cli") / _TEMPLATE, Path(), names, torch_device, found)
    return dict(sorted(found.items()))


def _collect(node: Traversable, path: Path, names: BackendNames, torch_device: str, found: dict[Path, str]) -> None:
    for child in node.iterdir():
        name = child.name.removesuffix(_SUFFIX)
        place = path / _renamed(_HIDDEN.get(name, name), names)
        if child.is_dir():
            _collect(child, place, names, torch_device, found)
        elif child.name.endswith(_SUFFIX):
            found[place] = _renamed(_on_device(child.read_text(encoding="utf-8"), torch_device), names)


def _on_device(text: str, torch_device: str) -> str:
    """The template is written for the host, which torch counts as one device, and which `auto` must not prefer."""
    if torch_device == "cpu":
        return text.replace("torch.device(DEVICE, index)", "torch.device(DEVICE)")
    text = text.replace("priority=-1,", "priority=10,").replace('"cpu"', f'"{torch_device}"')
    return text.replace("`cpu`", f"`{torch_device}`")


def _renamed(text: str, names: BackendNames) -> str:
    """The template is a package for the chip "acme"; longer words go first, since they hold the shorter ones."""
    text = text.replace("core-backend-acme", names.distribution).replace("core_acme", names.module)
    return text.replace("AcmeBackend", names.class_name).replace("acme", names.name)

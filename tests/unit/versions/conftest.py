"""What the tests of versions share: a core that is a minor ahead, packages, and Python with both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

from newer_contract import Runner, write_newer_core, write_packages  # noqa: E402
from vendor_package import path_env  # noqa: E402


@pytest.fixture(scope="session")
def newer_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a core whose contract is a minor ahead."""
    folder = tmp_path_factory.mktemp("newer")
    write_newer_core(folder)
    return folder


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packages of several contracts, as pip installs them."""
    folder = tmp_path_factory.mktemp("packages")
    write_packages(folder)
    return folder


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Where the backend writes what `supports` was asked, one operation a line."""
    return tmp_path / "asked.txt"


@pytest.fixture
def python(newer_core: Path, packages: Path, asked: Path) -> Runner:
    """Runs Python with arguments where the packages are installed, on the newer core or (`newer=False`) on this one."""

    def run(*arguments: str, newer: bool = True) -> subprocess.CompletedProcess[str]:
        folders = (newer_core, packages) if newer else (packages,)
        environment = {**os.environ, **path_env(*folders), "ACME_ASKED": str(asked)}
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=environment,
        )

    return run

"""A certificate of installed wheels: given for what they are, worthless for what somebody made of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WHEELS = os.environ.get("CORE_WHEELS")
pytestmark = pytest.mark.skipif(WHEELS is None, reason="needs built wheels; run `nox -s certificate`")
EDITED = "core_conformance/suite/test_l0_memory.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Core, suite and sim installed from their wheels into a folder that comes before everything else."""
    folder = tmp_path_factory.mktemp("site")
    wheels = [str(path) for path in sorted(Path(WHEELS or "").glob("*.whl"))]
    assert len(wheels) == 3, wheels
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *wheels]
    subprocess.run(command, check=True, timeout=300)
    return folder


def core(site: Path, *args: str) -> tuple[int, str]:
    command = [sys.executable, "-P", "-m", "core.cli", "conformance", *args]
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env, cwd=site)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(1800)
def test_wheels_are_certified_verified_and_refused_once_edited(site: Path, tmp_path: Path) -> None:
    certificate, report = tmp_path / "certificate.json", tmp_path / "report.json"
    certify = ("run", "--backend", "sim", "--level", "L0", "--report-dir", str(tmp_path), "--certify", str(certificate))
    code, text = core(site, *certify)
    assert code == 0 and "certified sim L0 (SIMULATED), self-reported" in text, text

    code, text = core(site, "verify", str(certificate))
    assert code == 0 and text.count("same content here") == 3 and "outcome: sim L0 (SIMULATED)" in text, text

    honest = report.read_bytes()
    report.write_bytes(honest.replace(b'"backend": "sim"', b'"backend": "cpu"'))
    code, text = core(site, "verify", str(certificate))
    assert code == 1 and "edited or replaced" in text, text
    report.write_bytes(honest)

    suite = (site / EDITED).read_bytes()
    (site / EDITED).write_bytes(suite + b"\n# one line\n")
    code, text = core(site, *certify)
    assert code == 2 and f"was edited after it was installed ({EDITED})" in text, text
    code, text = core(site, "verify", str(certificate))
    assert code == 1 and "its content here is not what was certified" in text and "FAIL        suite: it was" in text, (
        text
    )
    (site / EDITED).write_bytes(suite)

    (site / "core_conformance/suite/conftest.py").write_text("# a vendor's\n", encoding="utf-8")
    code, text = core(site, *certify)
    assert code == 2 and "core_conformance/suite/conftest.py" in text, text

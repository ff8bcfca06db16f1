"""The defaults and composites over a torch device that is not the host: whoever mixes the two is told so.

Of L2 and L3 only tokens are compared: transformers, which makes the goldens, loads wrong rope tables in a process that
has a device written in Python.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from acme_package import install
from core_process import default_device, run_core
from tiny import make_tiny

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("CORE_DOWNSTREAM") != "full", reason="takes minutes; `nox -s downstream` runs it"
    ),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A scaffolded package for the device, installed; its backend brings the device's own package as an SDK would."""
    home = tmp_path_factory.mktemp("far")
    done = run_core("new-backend", "farchip", "--torch-device", "far", cwd=home)
    assert done.returncode == 0, done.stderr
    backend = home / "core-backend-farchip" / "src" / "core_farchip" / "backend.py"
    text = backend.read_text(encoding="utf-8")
    backend.write_text(text.replace("import torch\n", "import far_device\nimport torch\n", 1), encoding="utf-8")
    env = install(home / "core-backend-farchip", home / "site")
    shutil.copy(Path(__file__).with_name("far_device.py"), home / "site")
    return env


def test_operations_are_right_on_it(far: dict[str, str]) -> None:
    done = run_core("conformance", "run", "--backend", "farchip", "--level", "L1", env=far, timeout=3000)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


def test_a_model_says_there_what_it_says_on_the_host(far: dict[str, str], tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "tiny")
    args = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--json", "--dtype", "float32")
    said = []
    for device in ("farchip", default_device()):
        done = run_core("generate", str(model), "--prompt", "Far away", "--device", device, *args, env=far)
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout)["outputs"][0]["token_ids"])
    assert said[0] == said[1] and len(said[0]) == 12

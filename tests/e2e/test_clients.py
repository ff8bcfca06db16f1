"""Published clients against `core serve` with real models, each client in an environment of its own.

The normal run has the `openai` package that it is installed with. The session `clients` makes an environment for every
client that is named here and runs all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_process import CoreServer, default_device, served
from real_models import MODELS, RealModel, pulled

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = os.environ.get("CORE_CLIENT_ENVIRONMENTS")
"""Folder that holds an environment for each client, by its name."""
CLIENTS = {
    "installed": "openai_client.py",
    "openai-2": "openai_client.py",
    "openai-3": "openai_client.py",
    "litellm": "litellm_client.py",
    "langchain-openai": "langchain_client.py",
}


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def real(request: pytest.FixtureRequest) -> Iterator[tuple[CoreServer, RealModel]]:
    model: RealModel = request.param
    if default_device() == "sim":
        pytest.skip("the simulated device is too slow for real models; install the CPU backend")
    with served(pulled(model.name), "--max-model-len", "512", *model.flags, name=model.name) as server:
        yield server, model


def python_of(client: str) -> str:
    """The client's interpreter; skips where there is none."""
    if client == "installed":
        pytest.importorskip("openai", reason="the openai package is not installed")
        return sys.executable
    path = Path(ENVIRONMENTS or ".") / client / "bin" / "python"
    if ENVIRONMENTS is None or not path.exists():
        pytest.skip(f"there is no environment with {client}; run `nox -s clients`")
    return str(path)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_published_client_gets_right_answers(real: tuple[CoreServer, RealModel], client: str) -> None:
    server, model = real
    script = str(HERE / "clients" / CLIENTS[client])
    done = subprocess.run(
        [python_of(client), script, f"{server.url}/v1", model.name, model.question, model.answer],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{server.log()}"
    assert done.stdout.strip().endswith(": right")

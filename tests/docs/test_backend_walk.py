"""docs/writing-a-backend.md, walked by a vendor who types what it says and nothing else.

Commands that take minutes are run by tests/e2e/test_downstream.py, in the session `downstream`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from acme_package import change, install, scaffold
from core_process import run_core
from markdown_blocks import REPO_ROOT, Block, blocks, commands
from tiny import make_tiny

PAGE = REPO_ROOT / "docs" / "writing-a-backend.md"

RUN_HERE = [
    "core new-backend acme --torch-device cpu",
    "pip install -e ./core-backend-acme",  # into a folder of its own: the tests' environment is left as it is
    "core backends",
    "core conformance run --backend acme --level L0",
    "core conformance next --backend acme",
    "core conformance run --backend acme --level L1 -k rms_norm",
    "core doctor --model smollm2-135m-instruct --device acme",  # over a tiny model
    "core conformance run --backend acme --level L1 -k linear",
]
RUN_DOWNSTREAM = [
    "core conformance run --backend acme --level L3 --report-dir first",
    "pip install ./core-backend-acme",
    "core conformance run --backend acme --level L3 --report-dir first --certify first/certificate.json",
    "core conformance verify first/certificate.json",
    "pytest core-backend-acme",
    "core conformance report first/report.json --html matrix.html",
]
"""Run by tests/e2e/test_downstream.py, whose fixture installs the package's wheel."""


@dataclass(frozen=True)
class Day:
    """The package at one point of the walk.

    Args:
        package: Its folder.
        env: Environment in which it is installed.
    """

    package: Path
    env: dict[str, str]

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Types a command of the page."""
        assert any(command in commands(block) for block in blocks(PAGE)), command
        return run_core(*shlex.split(command)[1:], env=self.env)

    def proves(self, command: str) -> str:
        """Types a command of the page that must end well, and gives what it says."""
        done = self.run(command)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr
        return done.stdout


def the_block(language: str, holds: str) -> Block:
    [found] = [block for block in blocks(PAGE) if block.language == language and holds in block.text]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("walk")


@pytest.fixture(scope="module")
def tiny_model(folder: Path) -> Path:
    return make_tiny("LlamaForCausalLM", folder / "tiny")


@pytest.fixture(scope="module")
def first_day(folder: Path) -> Day:
    """After step 1: what `core new-backend` wrote."""
    package = scaffold(folder, *shlex.split(RUN_HERE[0])[3:])
    return Day(package, install(package, folder / "site1"))


@pytest.fixture(scope="module")
def first_kernel(folder: Path, first_day: Day) -> Day:
    """After step 5: kernels.py as the page has it."""
    kernels = the_block("python", "class RmsNorm").text + "\n"
    package = change(first_day.package, folder / "step5", {"kernels.py": kernels})
    return Day(package, install(package, folder / "site5"))


@pytest.fixture(scope="module")
def own_weights(folder: Path, first_kernel: Day) -> Day:
    """After step 6: `pack`, and a product that reads what it packs."""
    package = change(first_kernel.package, folder / "step6", with_own_weights(first_kernel.package))
    return Day(package, install(package, folder / "site6"))


def with_own_weights(package: Path) -> dict[str, str]:
    """backend.py and kernels.py with the pieces of step 6, and the imports that they need."""
    source = package / "src" / "core_acme"
    kernels = (source / "kernels.py").read_text(encoding="utf-8")
    kernels = kernels.replace("import OpSpec,", "import LinearArgs, LinearOp, OpSpec,")
    kernels = kernels.replace("from core.backend.ops", "from core.backend import torch_dtype\nfrom core.backend.ops", 1)
    linear, refusal = the_block("python", "class Linear:").text, the_block("python", "isinstance(op, LinearOp)").text
    kernels = kernels.replace("class RmsNorm:", f"{linear}\n\n\nclass RmsNorm:")
    kernels = kernels.replace('{"rms_norm"', '{"linear": Linear, "rms_norm"')
    kernels = kernels.replace('    return ""\n', f'{refusal}\n    return ""\n')
    backend = (source / "backend.py").read_text(encoding="utf-8")
    backend = backend.replace("OpenConfig,", "OpenConfig, Packed, Role, Scheme,").replace(
        "Verdict\n", "Verdict, WeightSource\n", 1
    )
    backend = backend.replace("KERNELS, refusal", "KERNELS, TILE, refusal")
    backend = backend.replace("import torch\n", "import torch\nfrom torch.nn.functional import pad\n", 1)
    return {"kernels.py": kernels, "backend.py": f"{backend}\n{the_block('python', 'class Padded').text}\n"}


def kinds(day: Day, model: Path) -> dict[str, set[str]]:
    """Operation to how it is done, from the page's `core doctor` over a tiny model."""
    command = next(command for command in RUN_HERE if command.startswith("core doctor"))
    words = [str(model) if word.startswith("smollm2") else word for word in shlex.split(command)[1:]]
    done = run_core(*words, "--json", env=day.env)
    assert done.returncode == 0, done.stderr
    found: dict[str, set[str]] = {}
    for row in json.loads(done.stdout)["operations"]:
        found.setdefault(row["operation"], set()).add(row["kind"])
    return found


def ids(day: Day, model: Path) -> list[int]:
    """Tokens that the package makes of a prompt."""
    args = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--json", "--dtype", "float32")
    done = run_core("generate", str(model), "--prompt", "Acme", "--device", "acme", *args, env=day.env)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)["outputs"][0]["token_ids"]
    return found


def test_every_command_of_the_page_is_run_here_or_downstream() -> None:
    found = [command for block in blocks(PAGE) for command in commands(block)]
    assert sorted(found) == sorted([*RUN_HERE, *RUN_DOWNSTREAM])
    downstream = (REPO_ROOT / "tests" / "e2e" / "test_downstream.py").read_text(encoding="utf-8")
    assert [command for command in RUN_DOWNSTREAM if command not in downstream] == ["pip install ./core-backend-acme"]


def test_the_page_tells_what_the_command_writes(first_day: Day) -> None:
    written = {str(path.relative_to(first_day.package)) for path in first_day.package.rglob("*") if path.is_file()}
    told = set(re.findall(r"^\| `([^`]+\.\w+)` \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert told <= written
    assert len(written) == 10 and "The package has ten files" in PAGE.read_text(encoding="utf-8")
    backend = (first_day.package / "src" / "core_acme" / "backend.py").read_text(encoding="utf-8")
    assert the_block("python", "class AcmeBackend").text in backend


def test_it_is_listed(first_day: Day) -> None:
    assert re.search(r"^ *acme +core-backend-acme 0\.1\.0 ", first_day.proves("core backends"), re.MULTILINE)


def test_it_is_a_backend_at_once(first_day: Day) -> None:
    said = first_day.proves("core conformance run --backend acme --level L0")
    assert re.search(r"^acme L0 \(\w+\): complete", said, re.MULTILINE)


def test_what_to_write_next_is_measured_and_the_lines_are_counted(first_day: Day) -> None:
    said = first_day.proves("core conformance next --backend acme")
    assert re.search(r"^write next: \w+, \d+% of a decode step and \d+% of a prefill step", said, re.MULTILINE)
    [lines] = re.findall(r"core-backend-acme 0\.1\.0: (\d+) lines", said)
    assert int(lines) <= 60
    assert f"the package has {lines}." in PAGE.read_text(encoding="utf-8")


def test_four_methods_serve_a_model_with_everything_composite(first_day: Day, tiny_model: Path) -> None:
    assert set().union(*kinds(first_day, tiny_model).values()) == {"COMPOSITE"}
    assert len(ids(first_day, tiny_model)) == 6


def test_the_first_kernel_is_proved_and_used(first_kernel: Day, tiny_model: Path) -> None:
    first_kernel.proves("core conformance run --backend acme --level L1 -k rms_norm")
    found = kinds(first_kernel, tiny_model)
    assert "NATIVE" in found.pop("rms_norm")
    assert set().union(*found.values()) == {"COMPOSITE"}


def test_weights_in_its_own_form_are_proved_and_change_no_answer(
    first_day: Day, own_weights: Day, tiny_model: Path
) -> None:
    own_weights.proves("core conformance run --backend acme --level L1 -k linear")
    assert "NATIVE" in kinds(own_weights, tiny_model)["linear"]
    assert ids(own_weights, tiny_model) == ids(first_day, tiny_model)


def test_a_failure_says_what_the_page_shows(folder: Path, own_weights: Day) -> None:
    """The page's bug: the last tile of the sum is left out."""
    kernels = (own_weights.package / "src" / "core_acme" / "kernels.py").read_text(encoding="utf-8")
    whole = "weight.shape[1] - args.x.shape[1]))\n"
    assert whole in kernels
    kernels = kernels.replace(whole, f"{whole}        x[:, args.x.shape[1] // TILE * TILE :] = 0\n")
    package = change(own_weights.package, folder / "step7", {"kernels.py": kernels})
    done = Day(package, install(package, folder / "site7")).run(
        "core conformance run --backend acme --level L1 -k linear"
    )
    assert done.returncode == 1
    shown = " ".join(textwrap.dedent(the_block("", "likely tile tail").text).split())
    assert shown in {" ".join(line.split()) for line in done.stdout.splitlines()}

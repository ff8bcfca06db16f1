"""The GitHub Actions workflows: valid, safe, called with inputs that exist, and their scripts do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from core_conformance.matrix import read_tables
from core_conformance.report.document import read_report

REPO_ROOT = Path(__file__).parents[3]
FOLDER = REPO_ROOT / ".github" / "workflows"
REUSABLE = FOLDER / "conformance.yml"
TEMPLATE = REPO_ROOT / "core/cli/backend_template/github/workflows/conformance.yml.tmpl"
FILES = sorted(FOLDER.glob("*.yml"))


def parsed(path: Path) -> dict[Any, Any]:
    """The workflow; YAML 1.1 reads the key `on` as True."""
    loaded: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in parsed(path)["jobs"].values() for step in job.get("steps", ())]


def script(name: str) -> str:
    """What a named step of the reusable workflow runs."""
    [found] = {step["run"] for step in steps(REUSABLE) if step.get("name") == name}
    return str(found)


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("check-jsonschema")
    if not program.exists():
        pytest.skip("check-jsonschema is not installed; pip install check-jsonschema")
    command = [str(program), "--builtin-schema", "vendor.github-workflows", "--default-filetype", "yaml", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# -- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*FILES, TEMPLATE], ids=lambda path: path.name)
def test_a_workflow_is_valid(path: Path) -> None:
    done = check_schema(path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_invalid_workflow_is_seen(tmp_path: Path) -> None:
    (tmp_path / "broken.yml").write_text("on: push\njobs:\n  a:\n    runs_on: ubuntu-latest\n", encoding="utf-8")
    assert check_schema(tmp_path / "broken.yml").returncode == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_reads_alone_and_takes_no_text_into_a_script(path: Path) -> None:
    assert parsed(path)["permissions"] == {"contents": "read"}
    for step in steps(path):
        assert "${{" not in step.get("run", ""), f"{step}: a value in a script is code; give it by env"
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/checkout@v4")), step["uses"]
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_job_has_an_end(path: Path) -> None:
    for name, job in parsed(path)["jobs"].items():
        assert "uses" in job or job["timeout-minutes"], name


def test_callers_give_inputs_that_exist_and_the_documents_name_every_one() -> None:
    inputs = parsed(REUSABLE)[True]["workflow_call"]["inputs"]
    page = (REPO_ROOT / "docs/ci.md").read_text(encoding="utf-8")
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert example
    own = parsed(FOLDER / "ci.yml")["jobs"]["conformance"]
    vendors = [parsed(TEMPLATE)["jobs"]["conformance"], yaml.safe_load(example[1])["jobs"]["conformance"]]
    assert own["uses"] == "./.github/workflows/conformance.yml"
    for call in (own, *vendors):
        assert call["uses"].split("@")[0].endswith(".github/workflows/conformance.yml")
        assert set(call["with"]) <= set(inputs)
        assert {name for name, given in inputs.items() if given.get("required")} <= set(call["with"])
    assert set(re.findall(r"inputs\.([a-z-]+)", REUSABLE.read_text(encoding="utf-8"))) == set(inputs)
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page.partition("## The tables")[0], re.MULTILINE)) == set(inputs)


def test_this_projects_ci_shows_every_backend_of_its_table() -> None:
    backends = parsed(FOLDER / "ci.yml")["jobs"]["conformance"]["strategy"]["matrix"]["backend"]
    assert sorted(backends) == sorted(row.backend for row in read_tables(REPO_ROOT).runners)


def test_the_table_in_the_documents_can_be_read(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", (REPO_ROOT / "docs/ci.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block
    (tmp_path / ".conformance").mkdir()
    (tmp_path / ".conformance" / "runners.toml").write_text(block[1], encoding="utf-8")
    assert read_tables(tmp_path).runners[-1].models == ("llama", "gemma*")


# -- the scripts -----------------------------------------------------------------------------------------------------


def bash(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as the runner does, with this environment's `core`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outputs = {"GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": path, **outputs, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def plan(folder: Path, **environment: str) -> dict[str, str]:
    """Outputs of the step that plans the jobs, for a vendor's repository in `folder`."""
    given = {
        "BACKEND": "acme",
        "PACKAGE": ".",
        "RUNNER": "self-hosted,acme-1",
        "LEVEL": "L3",
        "SHARDS": "0",
        "SINCE": "",
    }
    done = bash(script("Plan the jobs"), folder, **{**given, **environment})
    assert done.returncode == 0, done.stderr
    lines = (folder / "output").read_text(encoding="utf-8").splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A vendor's repository with one commit."""
    folder = tmp_path / "vendor"
    folder.mkdir()
    (folder / "backend.py").write_text("x = 1\n", encoding="utf-8")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return folder


def test_the_plan_of_a_vendor_is_a_matrix_of_its_machine(repository: Path) -> None:
    found = plan(repository, SHARDS="2")
    rows = json.loads(found["matrix"])["include"]
    assert found["has_jobs"] == "true" and len(rows) == 2 * len(read_tables().models)
    assert rows[0]["labels"] == ["self-hosted", "acme-1"] and rows[0]["package"] == "."
    assert "| acme |" in (repository / "summary").read_text(encoding="utf-8")
    wanted = set(re.findall(r"\bmatrix\.([a-z_]+)", REUSABLE.read_text(encoding="utf-8"))) - {"html", "md"}
    assert wanted <= rows[0].keys(), "the workflow takes what the plan gives"


def test_the_plan_of_a_change_in_a_document_has_no_jobs(repository: Path) -> None:
    (repository / "README.md").write_text("new\n", encoding="utf-8")
    (repository / ".gitignore").write_text("output\nsummary\n", encoding="utf-8")
    assert plan(repository, SINCE="HEAD") == {"matrix": '{"include":[]}', "has_jobs": "false"}


def test_the_scripts_run_shards_and_make_one_report(tmp_path: Path) -> None:
    """Two shards of a few checks of L0 on the reference, merged, with the matrix as HTML."""
    found = plan(tmp_path, BACKEND="reference", PACKAGE="", RUNNER="", LEVEL="L0", SHARDS="2")
    rows = [row for row in json.loads(found["matrix"])["include"] if row["model"] == "llama"]
    assert len(rows) == 2
    for row in rows:
        done = bash(script("Run the checks"), tmp_path, ARGUMENTS=f"{row['arguments']} -k L0/memory")
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.move(tmp_path / "report", tmp_path / "shards" / f"shard-{row['artifact']}")
    done = bash(script("Make one report of each key's shards"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    merged = read_report(tmp_path / "reports" / f"{rows[0]['slug']}.json")
    assert [record.id for record in merged.records if record.ran] == ["L0/memory"] and merged.ok
    assert merged.facts.shard == "" and merged.facts.models == ("llama",)
    assert "reference" in (tmp_path / "reports" / "matrix.html").read_text(encoding="utf-8")
    shutil.rmtree(tmp_path / "shards" / f"shard-{rows[1]['artifact']}")
    done = bash(script("Make one report of each key's shards"), tmp_path)
    assert done.returncode == 1 and "shard 2/2 is missing" in done.stderr

"""Jobs of the matrix, those that a change concerns, and the command that prints them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from core.errors import ConfigError
from core_conformance.cli import app
from core_conformance.matrix import Job, Wanted, changed_files, expand, read_tables, touched, with_wanted
from core_conformance.matrix.render import MOST_JOBS, as_github
from core_conformance.matrix.tables import ModelRow, RunnerRow, Tables

REPO_ROOT = Path(__file__).parents[3]
HERE = read_tables(REPO_ROOT)


def names(jobs: Sequence[Job]) -> set[tuple[str, str]]:
    return {(job.runner.backend, job.model.name) for job in jobs}


EVERY = names(expand(HERE))
OF = {name: {key for key in EVERY if name in key} for name in ("llama", "gemma3", "cpu", "sim")}


# -- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_is_a_key_and_runs_the_lower_level() -> None:
    model = ModelRow(name="m", dtypes=("bfloat16", "float16"), quantizations=("none", "int8"), level="L3")
    runner = RunnerRow(backend="acme", labels=("x",), level="L2", dtypes=("bf*",))
    jobs = expand(Tables(models=(model,), runners=(runner,)))
    assert [job.key for job in jobs] == [
        ("acme", "m", "bfloat16", "none", "tp1"),
        ("acme", "m", "bfloat16", "int8", "tp1"),
    ]
    assert {job.level for job in jobs} == {"L2"}


def test_limits_of_a_runner_leave_models_and_layouts_out() -> None:
    models = (ModelRow(name="small", parallelism=("tp1", "tp2")), ModelRow(name="huge"))
    runner = RunnerRow(backend="acme", labels=("x",), models=("sm*",), parallelism=("tp2",))
    [job] = expand(Tables(models=models, runners=(runner,)))
    assert job.key == ("acme", "small", "suite", "none", "tp2")


def test_slugs_differ_and_fit_file_names() -> None:
    slugs = [job.slug for job in expand(HERE)]
    assert len(set(slugs)) == len(slugs)
    model = ModelRow(name="org/a model:latest", dtypes=("bfloat16",))
    [job] = expand(Tables(models=(model,), runners=(RunnerRow(backend="acme", hardware="card 7/8"),)))
    assert job.slug == "acme.card-7-8.org-a-model-latest.bfloat16.none.tp1"


def test_what_a_caller_wants_goes_over_the_tables() -> None:
    tables = with_wanted(HERE, Wanted(backends=("sim",), models=("llama",), level="L1", shards=3, labels=("big",)))
    [job] = expand(tables)
    assert (job.level, job.runner.shards, job.runner.labels) == ("L1", 3, ("big",))
    assert job.arguments(2)[-2:] == ["--shard", "2/3"]
    assert with_wanted(HERE, Wanted(level="L3")).runners == HERE.runners


def test_a_backend_of_no_table_becomes_a_runner_by_its_labels() -> None:
    jobs = expand(with_wanted(HERE, Wanted(backends=("acme",), labels=("self-hosted",), package=".")))
    assert {job.runner.backend for job in jobs} == {"acme"} and jobs[0].runner.package == "."
    assert touched(jobs, ["src/acme/kernels.py"], HERE) == jobs
    assert touched(jobs, ["README.md"], HERE) == []


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(backends=("acme",)), ["'acme'", "sim", "--labels"]),
        (Wanted(models=("lama",)), ["'lama'", "llama"]),
        (Wanted(shards=-1), ["--shards is -1"]),
    ],
)
def test_what_is_in_no_table_is_named(wanted: Wanted, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        with_wanted(HERE, wanted)
    for word in words:
        assert word in str(caught.value)


def test_what_the_suite_cannot_run_is_planned_and_not_given_to_ci() -> None:
    model = ModelRow(name="m", dtypes=("bfloat16",), quantizations=("int8",))
    jobs = expand(Tables(models=(model,), runners=(RunnerRow(backend="acme", labels=("x",)),)))
    assert len(jobs) == 1
    with pytest.raises(ConfigError, match=r"m as int8 tp1.*models\.toml"):
        as_github(jobs)


def test_a_checkpoint_is_run_in_its_type() -> None:
    model = ModelRow(name="models/mine", dtypes=("bfloat16",))
    [job] = expand(Tables(models=(model,), runners=(RunnerRow(backend="acme", labels=("x",)),)))
    assert job.arguments()[4:8] == ["--model", "models/mine", "--dtype", "bfloat16"]


def test_more_jobs_than_one_matrix_takes_are_refused() -> None:
    runner = RunnerRow(backend="acme", labels=("x",), shards=MOST_JOBS + 1)
    with pytest.raises(ConfigError, match=f"{MOST_JOBS + 1} jobs"):
        as_github(expand(Tables(models=(ModelRow(name="m"),), runners=(runner,))))


def test_a_runner_without_labels_is_refused() -> None:
    with pytest.raises(ConfigError, match="no labels"):
        as_github(expand(Tables(models=(ModelRow(name="m"),), runners=(RunnerRow(backend="acme"),))))


# -- changes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["core/sched/scheduler.py"], EVERY),
        (["conformance/src/core_conformance/run.py"], EVERY),
        (["core/models/decoder.py"], EVERY),
        (["core/models/llama.py"], OF["llama"]),
        (["core/models/gemma3.py"], OF["gemma3"]),
        (["backends/sim/src/core_sim/kernels.py"], OF["sim"]),
        (["backends/cpu/csrc/pool.cpp", "core/models/llama.py"], OF["cpu"] | OF["llama"]),
        (["something/new.xyz"], EVERY),
        (["docs/ci.md", "README.md", "tests/unit/x.py", "backends/sim/README.md"], set()),
        (["docs/ci.md", "backends/sim/pyproject.toml"], OF["sim"]),
        ([], set()),
    ],
)
def test_a_change_concerns_only_the_jobs_that_depend_on_it(files: list[str], expected: set[tuple[str, str]]) -> None:
    assert names(touched(expand(HERE), files, HERE)) == expected


def test_a_file_of_another_row_concerns_nothing_of_a_cut_down_matrix() -> None:
    jobs = expand(with_wanted(HERE, Wanted(backends=("sim",))))
    assert touched(jobs, ["backends/cpu/csrc/pool.cpp"], HERE) == []


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits on main, and a branch from the first with one of its own."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    for name in ("kept.py", "changed.py", "deleted.py", "old name.py"):
        (root / name).write_text(f"text of {name}\n" * 9, encoding="utf-8")
    (root / ".gitignore").write_text("*.log\n", encoding="utf-8")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    git(root, "switch", "-q", "-c", "branch")
    git(root, "switch", "-q", "main")
    (root / "kept.py").write_text("on main alone\n", encoding="utf-8")
    git(root, "commit", "-q", "-a", "-m", "two")
    git(root, "switch", "-q", "branch")
    (root / "changed.py").write_text("other\n", encoding="utf-8")
    git(root, "commit", "-q", "-a", "-m", "three")
    return root


def test_changes_are_counted_from_where_the_branch_left(repository: Path) -> None:
    assert changed_files(repository, "main") == ["changed.py"]
    assert changed_files(repository, "HEAD") == []


def test_staged_unstaged_untracked_deleted_and_renamed_files_count(repository: Path) -> None:
    (repository / "new folder").mkdir()
    (repository / "new folder" / "ünnamed.py").write_text("x\n", encoding="utf-8")
    (repository / "noise.log").write_text("x\n", encoding="utf-8")
    (repository / "deleted.py").unlink()
    git(repository, "mv", "old name.py", "new name.py")
    found = changed_files(repository, "HEAD")
    assert found == ["deleted.py", "new folder/ünnamed.py", "new name.py", "old name.py"]


def test_a_shallow_clone_compares_with_the_revision_itself(repository: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=1", "--no-single-branch", repository.as_uri(), str(shallow))
    assert changed_files(shallow, "origin/main") == ["changed.py", "kept.py"]


@pytest.mark.parametrize("rev", ["nosuch", "--output=x", "0" * 40, "HEAD:kept.py"])
def test_a_revision_that_git_does_not_know_is_refused(repository: Path, rev: str) -> None:
    with pytest.raises(ConfigError, match="--since"):
        changed_files(repository, rev)


# -- the command -----------------------------------------------------------------------------------------------------


def matrix(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["matrix", *arguments])


def outputs(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())  # type: ignore[arg-type,return-value]


@pytest.fixture
def inside(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(repository)
    return repository


def test_github_gets_two_lines_and_every_shard(inside: Path) -> None:
    found = outputs(matrix("--format", "github", "--shards", "2").output)
    assert found.keys() == {"matrix", "has_jobs"} and found["has_jobs"] == "true"
    include: list[dict[str, Any]] = json.loads(found["matrix"])["include"]
    assert [row["name"] for row in include if row["model"] == "llama"] == [
        "reference llama L3 1/2",
        "reference llama L3 2/2",
    ]
    assert include[0]["arguments"] == "--backend reference --level L3 --model llama --shard 1/2"
    assert len({row["artifact"] for row in include}) == len(include)


def test_an_empty_matrix_says_so(inside: Path) -> None:
    assert outputs(matrix("--format", "github", "--since", "HEAD").output) == {
        "matrix": '{"include":[]}',
        "has_jobs": "false",
    }
    assert "No job" in matrix("--since", "HEAD").output


def test_json_and_markdown_name_every_key(inside: Path) -> None:
    jobs = json.loads(matrix("--format", "json").output)["jobs"]
    found = [(job["backend"], job["model"], job["dtype"]) for job in jobs]
    assert found == [("reference", row.name, "suite") for row in read_tables().models]
    assert "| reference | host | gemma3 | suite | none | tp1 | L3 | SIMULATED | 1 |" in matrix().output


def test_a_mistake_is_an_error_of_exit_code_2(inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = matrix("--since", "nosuch").exception
    assert isinstance(found, ConfigError) and found.exit_code == 2 and "'nosuch'" in str(found)
    (tmp_path / "plain").mkdir()
    monkeypatch.chdir(tmp_path / "plain")
    assert matrix().exit_code == 0
    assert "git repository" in str(matrix("--since", "HEAD").exception)

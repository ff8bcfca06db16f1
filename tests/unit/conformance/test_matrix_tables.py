"""`models.toml` and `runners.toml`: the package's own, and what a repository lays over them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.models.registry import BUILT_IN
from core_conformance.engines.models import MODELS
from core_conformance.matrix import Tables, read_tables
from core_conformance.sharding import WITNESS

REPO_ROOT = Path(__file__).parents[3]


def names(tables: Tables) -> list[str]:
    return [row.name for row in tables.models]


def lay(root: Path, **files: str) -> Path:
    """A repository with these override files."""
    (root / ".conformance").mkdir(parents=True)
    for name, text in files.items():
        (root / ".conformance" / f"{name}.toml").write_text(text, encoding="utf-8")
    return root


def test_every_model_of_the_suite_has_a_row_but_the_witness() -> None:
    assert {row.name for row in read_tables().models} == set(MODELS) - {WITNESS}


def test_the_package_names_no_vendor() -> None:
    assert [row.backend for row in read_tables().runners] == ["reference"]


def test_this_repository_adds_its_backends() -> None:
    runners = {row.backend: row for row in read_tables(REPO_ROOT).runners}
    assert {"reference", "cpu", "sim"} <= runners.keys()
    for name in ("cpu", "sim"):
        assert runners[name].package == f"./backends/{name}" and runners[name].labels
        assert (REPO_ROOT / runners[name].package / "pyproject.toml").is_file()
    assert (runners["cpu"].mode, runners["sim"].mode) == ("VALIDATED", "SIMULATED")


def test_a_model_row_names_every_file_of_its_architecture_that_a_row_names() -> None:
    """A file that one row claims and another model imports would let that model's change pass unseen."""
    rows = read_tables(REPO_ROOT).models
    claimed = {path for row in rows for path in row.paths}
    homes = {entry.architecture: entry.load.partition(":")[0].replace(".", "/") + ".py" for entry in BUILT_IN}
    for row in rows:
        assert homes[row.architecture] in row.paths, f"{row.name} must name {homes[row.architecture]}"
        for file in claimed - set(row.paths):
            assert file not in imported(homes[row.architecture]), f"{row.name} depends on {file}"
        for path in row.paths:
            assert (REPO_ROOT / path).is_file(), path


def imported(file: str) -> set[str]:
    """Files of core/models that a file imports, at any depth."""
    found: set[str] = set()
    queue = [file]
    while queue:
        for node in ast.walk(ast.parse((REPO_ROOT / queue.pop()).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("core.models."):
                path = (node.module or "").replace(".", "/") + ".py"
                queue += [path] if path not in found else []
                found.add(path)
    return found


def test_a_row_of_the_same_name_changes_the_fields_that_it_gives(tmp_path: Path) -> None:
    tables = read_tables(lay(tmp_path, models='[[model]]\nname = "llama"\nlevel = "L2"\n'))
    [row] = [row for row in tables.models if row.name == "llama"]
    assert row.level == "L2" and row.architecture == "LlamaForCausalLM"


def test_a_repository_adds_rows_takes_rows_out_and_ignores_files(tmp_path: Path) -> None:
    models = '[[model]]\nname = "mine"\ndtypes = ["bfloat16"]\n[[model]]\nname = "gemma3"\nenabled = false\n'
    runners = '[[runner]]\nbackend = "acme"\nlabels = ["acme-1"]\n[changes]\nignore = ["tools/*"]\n'
    tables = read_tables(lay(tmp_path, models=models, runners=runners))
    assert [row.name for row in tables.models] == [*(n for n in names(read_tables()) if n != "gemma3"), "mine"]
    assert tables.runners[-1].labels == ("acme-1",) and tables.runners[-1].mode == "VALIDATED"
    assert "tools/*" in tables.ignore and "docs/*" in tables.ignore


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("models", "[[model]\n", ["models.toml", "TOML"]),
        ("models", '[[model]]\nnaem = "x"\n', ["models.toml", "'naem'", "name"]),
        ("models", '[[model]]\nlevel = "L1"\n', ["models.toml", "name"]),
        ("models", '[[model]]\nname = "x"\nlevel = "L9"\n', ["'L9'", "L0"]),
        ("models", '[[model]]\nname = "x"\ndtypes = "bfloat16"\n', ["dtypes", "'bfloat16'", "list"]),
        ("runners", '[[runner]]\nbackend = "x"\nshards = 0\n', ["shards is 0", "1 or more"]),
        ("runners", '[[runner]]\nbackend = "x"\nshards = true\n', ["shards", "whole number"]),
        ("runners", '[[runner]]\nbackend = "x"\nmode = "SURE"\n', ["'SURE'", "VALIDATED"]),
    ],
)
def test_a_mistake_names_file_field_and_remedy(tmp_path: Path, file: str, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tables(lay(tmp_path, **{file: text}))
    for word in words:
        assert word in str(caught.value)

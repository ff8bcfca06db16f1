"""`core doctor` for chips that are not here: every operation NATIVE, or COMPOSITE with a reason that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from tiny import ARCHITECTURES, make_tiny
from typer.testing import CliRunner

from core.cli.app import app
from core.config import CacheConfig, EngineConfig
from core.engine.doctor import DoctorReport, report, report_operations
from core.engine.operation_list import read_operations
from core.errors import ConfigError, UnsupportedError
from core_conformance.operation_sets import operation_sets
from core_triton.simulation import archs

CHIPS = [("cuda", arch) for arch in archs("cuda")] + [("rocm", arch) for arch in archs("hip")]
SETS = operation_sets()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each architecture that the core has."""
    root = tmp_path_factory.mktemp("models")
    return {name: make_tiny(name, root / name) for name in ARCHITECTURES}


def composites(found: DoctorReport) -> dict[str, str]:
    """Reason by operation, for what is not NATIVE; none of them may be NO or without one."""
    rows = [row for row in found.operations if row.kind != "NATIVE"]
    assert all(row.kind == "COMPOSITE" and row.reason for row in rows), rows
    return {row.operation: row.reason for row in rows}


@pytest.mark.parametrize(("device", "arch"), CHIPS)
def test_every_model_of_the_core_is_native_on_every_chip(folders: dict[str, Path], device: str, arch: str) -> None:
    for name, folder in folders.items():
        found = report(EngineConfig(model=str(folder), device=device), arch)
        assert found.usable and found.arch == arch and found.dtype == "float32"
        assert composites(found) == {}, name
        assert found.graphs == "graphs of decode steps"


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize(("device", "arch"), CHIPS)
def test_quantized_at_load_is_native_on_every_chip(
    folders: dict[str, Path], device: str, arch: str, quantization: str
) -> None:
    folder = folders["LlamaForCausalLM"]
    config = EngineConfig(model=str(folder), device=device, dtype="bfloat16", quantization=quantization)
    assert composites(report(config, arch)) == {}


@pytest.mark.parametrize("name", sorted(SETS))
@pytest.mark.parametrize(("device", "arch"), CHIPS)
def test_operations_of_models_to_come_are_native_or_say_why(device: str, arch: str, name: str) -> None:
    found = report_operations(EngineConfig(model="", device=device), read_operations(SETS[name]), arch)
    assert found.usable
    reasons = composites(found)
    assert set(reasons) <= {"reduce_norm", "dispatch", "combine"}, reasons
    assert "no kernel for it" not in reasons.values()


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2", "qwen3-next"])
def test_the_lists_hold_what_makes_these_models_special(name: str) -> None:
    special = {
        "deepseek-v3": {"mla", "route", "experts"},
        "deepseek-v3.2": {"index_topk", "mla"},
        "qwen3-next": {"conv1d", "gated_delta"},
    }[name]
    operations = read_operations(SETS[name]).operations
    assert special <= {op.name for op in operations}
    schemes = {getattr(op, "scheme", "none") for op in operations}
    assert ("fp8_block" in schemes) == name.startswith("deepseek")
    assert name != "deepseek-v3.2" or any(op.has("sparse") for op in operations)


def run(*args: str) -> Result:
    """`core doctor ARGS`, in this process; errors of the user are left as they are raised."""
    return CliRunner().invoke(app, ["doctor", *args])


def test_the_command_takes_a_list_and_an_architecture() -> None:
    done = run("--ops", str(SETS["deepseek-v3.2"]), "--device", "cuda", "--arch", "sm_100", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["arch"], told["usable"], told["weights"]) == ("sm_100", True, [])
    assert {row["operation"] for row in told["operations"] if not row["part_of"]} >= {"index_topk", "mla", "linear"}


@pytest.mark.parametrize(("device", "arch"), [("cuda", "sm_75"), ("rocm", "gfx803"), ("cuda", "gfx942")])
def test_a_chip_that_nothing_is_built_for_is_refused(device: str, arch: str) -> None:
    found = report_operations(EngineConfig(model="", device=device), read_operations(SETS["qwen3-next"]), arch)
    assert not found.usable
    assert all(row.kind == "NO" and f"{arch} is none of the chips" in row.reason for row in found.operations)


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "refused"),
    [("sm_80", "float8_e4m3fn", True), ("sm_90", "float8_e4m3fn", False), ("sm_90", "float8_e4m3fnuz", True)],
)
def test_a_cache_of_8_bit_floats_is_refused_where_the_chip_has_none(
    tmp_path: Path, arch: str, kv_dtype: str, refused: bool
) -> None:
    file = tmp_path / "ops.toml"
    file.write_text(
        f"[[operations]]\nop='kv_write'\nnum_kv_heads=2\nhead_dim=64\nv_head_dim=64\nkv_dtype='{kv_dtype}'\n"
    )
    done = run("--ops", str(file), "--device", "cuda", "--arch", arch)
    assert done.exit_code == (2 if refused else 0), done.stdout
    assert (f"{arch} has no {kv_dtype}; choose another type of cache" in done.stdout) == refused


def test_a_block_size_that_the_kernels_do_not_take_is_refused(folders: dict[str, Path]) -> None:
    config = EngineConfig(model=str(folders["LlamaForCausalLM"]), device="cuda", cache=CacheConfig(block_size=48))
    with pytest.raises(UnsupportedError, match=r"blocks of 16, 32, 64, 128 tokens, not of 48.*--block-size"):
        report(config, "sm_90")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"has no \[\[operations\]\]"),
        ("[[operations]\n", "is no TOML"),
        ("[[operations]]\nop = 'matmul'\n", "operation 1 of --ops: op = 'matmul' is none; known are act_mul"),
        ("[[operations]]\nop = 'embed'\ndim = 64\nwidth = 2\n", r"\(embed\) has no width; its fields are"),
        ("[[operations]]\nop = 'embed'\n", r"\(embed\): .*missing required field `dim`"),
        ("operations = [1, 2]\n", r"has no \[\[operations\]\]; give at least one table"),
        ("[[operations]]\ndim = 64\n", "operation 1 of --ops: has no op; known are act_mul"),
        ("title = 5\n[[operations]]\nop = 'embed'\ndim = 64\n", "a title that is no string"),
        ("name = 'x'\n[[operations]]\nop = 'embed'\ndim = 64\n", "has no name; it holds title, dtype"),
        ("dtype = 'bf99'\n[[operations]]\nop = 'embed'\ndim = 64\n", "dtype 'bf99' is unknown"),
    ],
)
def test_a_list_that_is_none_is_told_where(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "ops.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_operations(file)


@pytest.mark.parametrize("args", [[], ["--model", "m", "--ops", "f"]])
def test_the_command_wants_a_model_or_a_list(args: list[str]) -> None:
    failure = run(*args, "--device", "cuda").exception
    assert isinstance(failure, ConfigError) and "give --model MODEL or --ops FILE" in str(failure)


def test_an_architecture_needs_its_backend_and_a_refusal_ends_in_one_line() -> None:
    failure = run("--ops", str(SETS["qwen3-next"]), "--arch", "sm_90").exception
    assert isinstance(failure, ConfigError) and "--device NAME" in str(failure)
    done = run("--ops", str(SETS["qwen3-next"]), "--device", "cuda", "--arch", "sm_99")
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert "refuses" in line and "sm_99 is none of the chips" in line


def test_a_missing_list_is_told() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory; check the path"):
        read_operations(Path("/nowhere/ops.toml"))

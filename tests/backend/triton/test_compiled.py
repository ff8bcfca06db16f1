"""COMPILED: gates that catch what they are there for, and a telling selection of builds. `nox -s compiled` runs all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import CoreError
from core_triton.aot import gates, resources, table
from core_triton.aot.compiling import NOT_COMPILED, Compiled, Job, jobs
from core_triton.aot.resources import Resources

HERE = Path(__file__).parent
TABLE = HERE.parents[2] / "docs" / "compiled-kernels.md"


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    # Kernels of this very process are decorated for the interpreter.
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env={**clean, **env})


def test_each_gate_catches_the_kernel_that_breaks_it_and_lets_the_right_one_pass() -> None:
    done = run(str(HERE / "compiled_cases.py"), "sm_90", "gfx942")
    assert done.returncode == 0, done.stderr
    findings, matrix = (json.loads(line) for line in done.stdout.splitlines())
    caught = {(arch, label, gate) for arch, label, gate, _ in findings}
    for arch in ("sm_90", "gfx942"):
        # What spills may well be too large too.
        assert {
            (arch, "spilling", "spills"),
            (arch, "too large", "shared"),
            (arch, "no instruction", "instruction"),
            (arch, "refused", "compiles"),
        } <= caught
        assert not [finding for finding in caught if finding[:2] == (arch, "right")]
    assert matrix[0][0].startswith("HGMMA") and matrix[1][0].startswith("v_mfma")


def test_a_telling_selection_compiles_within_every_gate() -> None:
    targets = [word for arch in ("sm_80", "sm_100", "gfx942") for word in ("--target", arch)]
    labels = [word for text in SELECTION for word in ("-k", text)]
    done = run("-m", "core_triton.aot", *targets, *labels, "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout


SELECTION = ("linear [linear bf16 decode]", "linear [linear fp8 block prefill]", "rms_norm [rms_norm bf16 128]")


def test_the_table_in_the_docs_lists_every_kernel_and_target() -> None:
    listed, wanted = table.listed_jobs(TABLE.read_text(encoding="utf-8")), set(jobs())
    missing, gone = sorted(wanted - listed), sorted(listed - wanted)
    assert not missing and not gone, (
        f"{len(missing)} builds are not in the table ({missing[:3]}), {len(gone)} are no more ({gone[:3]}): "
        "python -m core_triton.aot --write docs/compiled-kernels.md"
    )


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (["--list"], {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set"),
        (["--target", "sm_1"], {}, "no such target"),
        (["-k", "no such thing"], {}, "no build matches"),
        (["-k", "linear", "--write", "x.md"], {}, "--write makes the table of all builds"),
    ],
)
def test_what_cannot_be_done_is_exit_code_2_with_the_reason(
    arguments: list[str], env: dict[str, str], said: str
) -> None:
    done = run("-m", "core_triton.aot", *arguments, **env)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def compiled(arch: str = "sm_90", *, label: str = "case", spills: int = 0, scalar_spills: int = 0) -> Compiled:
    found = Resources(
        registers=64,
        spills=spills,
        stack_bytes=0,
        shared_bytes=1024,
        occupancy=4,
        matrix=("HMMA.1",),
        scalar_spills=scalar_spills,
    )
    return Compiled(job=Job("toy", label, arch), kernel="k", matrix_wanted=True, num_warps=4, resources=found, tile=16)


def test_an_exception_covers_no_more_than_it_says_and_one_that_covers_nothing_is_reported() -> None:
    text = '[[exception]]\ngate="spills"\nop="toy"\ntargets=["sm_9*"]\nat_most=3\nreason="a reason that can be read"'
    listed = gates.exemptions(text)
    for arch, spills, scalar, open_count in (
        ("sm_90", 3, 0, 0),
        ("sm_90", 4, 0, 1),
        ("sm_90", 1, 3, 1),
        ("sm_80", 3, 0, 1),
    ):
        case = compiled(arch, spills=spills, scalar_spills=scalar)
        findings, let_off, idle = gates.judge([case], listed, complete=True)
        assert (len(findings), len(let_off), len(idle)) == (open_count, 1 - open_count, open_count)


def test_an_exception_without_a_reason_is_refused() -> None:
    with pytest.raises(CoreError, match="a reason to be read"):
        gates.exemptions('[[exception]]\ngate="spills"\nop="toy"\ntargets=["sm_90"]\nreason="x"')


@pytest.mark.parametrize(
    ("instruction", "family"),
    [
        ("HMMA.16816.F32.BF16", "mma"),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", "wgmma"),
        ("UTCQMMA", "tcgen05"),
        ("v_mfma_f32_32x32x8_bf16", "mfma"),
        ("v_wmma_f32_16x16x16_bf16", "wmma"),
        ("FFMA", ""),
    ],
)
def test_an_instruction_belongs_to_its_family(instruction: str, family: str) -> None:
    assert resources.family_of(instruction) == family


def test_a_large_tile_must_use_the_instruction_of_its_chip_and_a_small_one_need_not() -> None:
    small = compiled("sm_90")
    assert not gates.judge([small], [], complete=False)[0]
    large = Compiled.from_dict({**small.to_dict(), "tile": 128})
    (finding,), _, _ = gates.judge([large], [], complete=False)
    assert finding.gate == "instruction" and "wgmma was wanted, mma found" in finding.reason


def test_the_table_says_again_what_was_put_in() -> None:
    results = [compiled("sm_80"), compiled("sm_90"), compiled("sm_90", label="other", spills=2, scalar_spills=3)]
    text = table.render(results, [], triton_version="3.8.0", findings=1)
    assert table.listed_jobs(text) == {found.job for found in results}
    assert "| other | - | 64+2~3/1/4 mma |" in text and "**1 gates do not hold**" in text


def test_scalar_registers_in_lanes_of_vector_registers_are_a_finding_with_their_own_word() -> None:
    (finding,), _, _ = gates.judge([compiled(scalar_spills=3)], [], complete=False)
    assert finding.gate == "spills" and finding.reason.startswith("3 scalar spills")


def test_what_was_not_compiled_is_untested_in_the_table_and_no_finding() -> None:
    known = compiled("sm_80")
    other = Compiled.from_dict({**known.to_dict(), "job": {"op": "toy", "label": "new", "arch": "sm_80"}})
    unknown = Compiled.from_dict({**other.to_dict(), "resources": None, "error": NOT_COMPILED})
    assert gates.judge([known, unknown], [], complete=True) == ([], [], [])
    text = table.render([known, unknown], [], triton_version="3.8.0", findings=0)
    assert "| new | UNTESTED |" in text and "1 are **UNTESTED**" in text

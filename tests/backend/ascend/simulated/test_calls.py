"""Every call that the backend's sources make, held against the schemas of the real torch_npu."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from call_sites import Site, complaints, sites

import core_ascend
from core_conformance.subject import Subject

SOURCES = Path(core_ascend.__file__).parent


def all_sites() -> list[Site]:
    files = [path for path in SOURCES.rglob("*.py") if "simulation" not in path.parts]
    return [site for path in sorted(files) for site in sites(path.read_text(encoding="utf-8"), path.name)]


def test_every_call_matches_a_schema_of_torch_npu(subject: Subject) -> None:
    found = all_sites()
    assert len(found) >= 25, "the search for calls finds too few of them"
    assert [line for site in found for line in complaints(site)] == []
    print(f"{len(found)} of {len(found)} calls match, {len({site.name for site in found})} operators")


def test_every_operator_that_is_called_has_numerics_in_the_simulation(subject: Subject) -> None:
    from core_ascend.simulation.calls import NUMERICS

    names = {name.partition("::")[2] for name in NUMERICS}
    assert {site.name for site in all_sites()} <= names


@pytest.mark.parametrize(
    ("planted", "word"),
    [
        ("vendor.npu_rms_norm(x, w, epsilom=1e-6)", "epsilom"),
        ("vendor.npu_rms_nrom(x, w)", "npu_rms_nrom"),
        ("vendor.npu_swiglu(x, 1, 2, 3)", "4 positional"),
        ("vendor.npu_scatter_pa_kv_cache(key=k, value=v, key_cache=a, value_cache=b)", "slot_mapping"),
        ("vendor._npu_reshape_and_cache(key=k, value=v, key_cache=a, value_cache=b, slots=s)", "slots"),
    ],
)
def test_a_misspelt_call_is_reported(subject: Subject, planted: str, word: str) -> None:
    [site] = sites(planted, "planted.py")
    assert word in " ".join(complaints(site))


def test_the_dispatcher_itself_refuses_a_misspelt_argument(subject: Subject) -> None:
    from core_ascend.vendor import npu

    with pytest.raises((RuntimeError, TypeError), match="epsilom"):
        npu().npu_rms_norm(torch.ones(1, 4), torch.ones(4), epsilom=1e-6)


def test_a_wrong_shape_does_not_pass_the_meta_kernel(subject: Subject) -> None:
    from core_ascend.simulation import calls
    from core_ascend.simulation.faults import NpuFault
    from core_ascend.vendor import npu

    honest = calls.NUMERICS["npu::npu_swiglu"]
    calls.NUMERICS["npu::npu_swiglu"] = lambda input, dim=-1: input
    try:
        with pytest.raises(NpuFault, match="Meta kernel"):
            npu().npu_swiglu(torch.ones(3, 5, 8, dtype=torch.float16), dim=2)
    finally:
        calls.NUMERICS["npu::npu_swiglu"] = honest


def test_the_sources_import_torch_npu_at_one_place_alone() -> None:
    importers = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            importers += [path.name for name in names if name.partition(".")[0] == "torch_npu"]
    assert importers == []

"""What the backend says of operations, without torch_npu and without a device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from core.backend import Kind, Lens
from core.backend.ops import AttentionOp, KvWriteOp, LinearOp, MlaOp
from core.config import EngineConfig
from core.engine.doctor import DoctorReport, OperationRow, report, report_operations
from core.engine.operation_list import read_operations
from core.spec import CacheKind, DeviceInfo, DType, KVCacheSpec
from core_ascend.backend import AscendBackend
from core_ascend.chips import CHIPS, chip_named
from core_conformance.engines.models import ENGINE_MODELS, model_folder
from core_conformance.operation_sets import operation_sets

SOCS = {"910B": "Ascend910B3", "910C": "Ascend910_9382", "310P": "Ascend310P3"}


def device(family: str = "910B") -> DeviceInfo:
    return DeviceInfo(index=0, arch=SOCS[family], memory_bytes=0, sdk="")


def attention(**changes: object) -> AttentionOp:
    fields: dict[str, object] = {
        "dtype": DType.BFLOAT16, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "v_head_dim": 128,
        "kv_dtype": DType.BFLOAT16, "scale": 0.1,
    }  # fmt: skip
    return AttentionOp(**(fields | changes))  # type: ignore[arg-type]


def test_every_family_has_a_soc_and_strangers_have_none() -> None:
    assert {chip.family for chip in CHIPS} == set(SOCS)
    for family, soc in SOCS.items():
        chip = chip_named(soc)
        assert chip is not None and chip.family == family
    assert [chip_named(name) for name in ("Ascend910A", "Ascend910", "Ascend950", "Ascend310", "sm_90")] == [None] * 5


def test_attention_asks_for_exact_lists_and_sixteen_queries_a_decode() -> None:
    verdict = AscendBackend().supports(attention(), device())
    assert (verdict.kind, verdict.lens, verdict.max_decode_q) == (Kind.NATIVE, Lens.HOST_EXACT, 16)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"dtype": DType.FLOAT32, "kv_dtype": DType.FLOAT32}, "float32"),
        ({"head_dim": 512, "v_head_dim": 512}, "512"),
        ({"head_dim": 72, "v_head_dim": 72}, "72"),
        ({"head_dim": 192}, "different widths"),
        ({"features": frozenset({"scales"})}, "scales"),
        ({"features": frozenset({"sinks", "lse"})}, "log-sum-exp"),
        ({"features": frozenset({"sinks"}), "head_dim": 256, "v_head_dim": 256}, "sinks"),
        ({"num_heads": 130, "num_kv_heads": 2}, "share"),
    ],
)
def test_attention_that_the_call_cannot_do_is_composed_with_the_reason(changes: dict[str, object], word: str) -> None:
    verdict = AscendBackend().supports(attention(**changes), device())
    assert verdict.kind is Kind.COMPOSITE
    assert word in verdict.reason


@pytest.mark.parametrize("family", SOCS)
def test_fp8_is_refused_where_it_was_asked_for_and_dense_where_it_was_stored(family: str) -> None:
    def linear(scheme: str) -> LinearOp:
        return LinearOp(dtype=DType.FLOAT16, in_features=64, out_features=64, scheme=scheme)

    asked = AscendBackend().supports(linear("fp8_channel"), device(family))
    stored = AscendBackend().supports(linear("fp8_block"), device(family))
    assert (asked.kind, stored.kind) == (Kind.NO, Kind.COMPOSITE)
    assert f"{family} has no FP8 unit" in asked.reason and f"{family} has no FP8 unit" in stored.reason
    cache = AscendBackend().supports(attention(kv_dtype=DType.FLOAT8_E4M3FN), device(family))
    assert cache.kind is Kind.NO and "FP8" in cache.reason


def test_what_the_older_chip_lacks_is_said() -> None:
    backend, old = AscendBackend(), device("310P")
    bf16 = backend.supports(LinearOp(dtype=DType.BFLOAT16, in_features=64, out_features=64), old)
    assert bf16.kind is Kind.COMPOSITE and "310P" in bf16.reason
    int8 = LinearOp(dtype=DType.FLOAT16, in_features=64, out_features=64, scheme="int8", out_dtype=DType.FLOAT16)
    assert "310P" in backend.supports(int8, old).reason
    half = attention(dtype=DType.FLOAT16, kv_dtype=DType.FLOAT16)
    assert backend.supports(half, old).kind is Kind.NATIVE
    capped = attention(dtype=DType.FLOAT16, kv_dtype=DType.FLOAT16, softcap=30.0)
    assert backend.supports(capped, old).kind is Kind.NO, "no composite reads fractals"
    mla = MlaOp(dtype=DType.FLOAT16, num_heads=2, latent_dim=512, rope_dim=64, kv_dtype=DType.FLOAT16, scale=0.1)
    assert backend.supports(mla, old).kind is Kind.COMPOSITE


def test_layouts_are_the_ones_that_the_calls_read() -> None:
    spec = KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=DType.FLOAT16)
    small, large = AscendBackend(), AscendBackend()
    op = KvWriteOp(dtype=DType.FLOAT16, num_kv_heads=2, head_dim=64, v_head_dim=64, kv_dtype=DType.FLOAT16)
    small.supports(op, device("310P"))
    large.supports(op, device("910B"))
    fractal = small.kv_layout(spec, 128)
    assert [plane.block_shape for plane in fractal.planes] == [(8, 128, 16)] * 2
    assert large.kv_layout(spec, 128).canonical
    latent = KVCacheSpec(kind=CacheKind.MLA, num_kv_heads=1, head_dim=576, v_head_dim=0, dtype=DType.BFLOAT16)
    assert [plane.name for plane in large.kv_layout(latent, 128).planes] == ["latent", "rope"]


def test_a_write_that_the_call_cannot_store_is_composed() -> None:
    op = KvWriteOp(dtype=DType.BFLOAT16, num_kv_heads=1, head_dim=128, v_head_dim=0, kv_dtype=DType.BFLOAT16)
    verdict = AscendBackend().supports(op, device())
    assert verdict.kind is Kind.COMPOSITE and verdict.reason


def rows_of(found: DoctorReport) -> list[OperationRow]:
    """The rows of a report; each is native, or composed with a reason."""
    assert found.usable and found.operations
    for row in found.operations:
        assert row.kind == "NATIVE" or (row.kind == "COMPOSITE" and row.reason), row
    return list(found.operations)


@pytest.mark.parametrize("name", sorted(operation_sets()))
@pytest.mark.parametrize("family", SOCS)
def test_every_operation_of_the_large_models_is_native_or_composed_with_a_reason(name: str, family: str) -> None:
    config = EngineConfig(model="", device="ascend")
    rows = rows_of(report_operations(config, read_operations(operation_sets()[name]), SOCS[family]))
    native = {row.operation for row in rows if row.kind == "NATIVE"}
    wanted = {
        "deepseek-v3": {"mla", "mla_prolog", "route", "embed", "rms_norm"},
        "deepseek-v3.2": {"mla", "index_topk", "rope"},
        "qwen3-next": {"gated_delta", "attention", "experts", "route"},
    }
    assert family == "310P" or wanted.get(name, set()) <= native


@pytest.mark.parametrize("model", ENGINE_MODELS)
@pytest.mark.parametrize(("family", "dtype"), [("910B", "bfloat16"), ("910C", "float32"), ("310P", "float16")])
def test_every_operation_of_the_core_s_models_is_native_or_composed_with_a_reason(
    model: str, family: str, dtype: str
) -> None:
    rows_of(report(EngineConfig(model=str(model_folder(model)), device="ascend", dtype=dtype), SOCS[family]))


def test_supports_needs_no_torch_npu() -> None:
    assert "torch_npu" not in sys.modules
    assert Path(AscendBackend.__module__.replace(".", "/")).name == "backend"

"""Resolution: NATIVE, COMPOSITE or an error that names it, once and at load."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from bare import DEVICE, INFO, BareBackend, binder, opened
from samples import SAMPLES

from core.backend import Kind, KVLayout, Plane, UnsupportedError, Verdict
from core.backend.negotiate import Binder, check_api, judge
from core.backend.ops import (
    ActMulArgs,
    ActMulOp,
    Args,
    AttentionOp,
    Determinism,
    KvWriteOp,
    OpSpec,
    QkNormRopeWriteOp,
    ReduceNormOp,
    RmsNormArgs,
    RmsNormOp,
    SampleOp,
    newer_fields,
    optional,
    since,
)
from core.backend.reference import COMPOSITES, DECOMPOSITIONS
from core.errors import ContractVersionError
from core.spec import CONTRACT_VERSION, BackendInfo, DeviceInfo, DType, KVCacheSpec

NORM = RmsNormOp(dtype=DType.FLOAT32, dim=4, eps=1e-6)
ACT = ActMulOp(dtype=DType.FLOAT32, size=2)
REDUCE = ReduceNormOp(dtype=DType.FLOAT32, dim=4, eps=1e-6)
WIDE = SampleOp(dtype=DType.FLOAT32, vocab_size=9, features=frozenset({"top_k", "top_p", "min_p"}))
ATTENTION = AttentionOp(
    dtype=DType.FLOAT32, num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=4, kv_dtype=DType.FLOAT32, scale=0.5
)


class Vendor(BareBackend):
    """A backend with verdicts by operation name; native callables say who they are."""

    def __init__(self, **verdicts: Verdict) -> None:
        self.verdicts = verdicts
        self.asked: list[str] = []

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        self.asked.append(op.name)
        return self.verdicts.get(op.name, Verdict.composite("not written yet"))

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        def kernel(args: Any) -> Any:
            return "kernel", op.name

        return kernel


def over(backend: BareBackend, **info: Any) -> Binder:
    return Binder(backend, dataclasses.replace(INFO, **info), DEVICE, block_size=4)


def test_native_is_the_backends_own_callable() -> None:
    table = over(Vendor(act_mul=Verdict.native()))
    assert table.bind(ACT)(ActMulArgs(x=torch.zeros(1, 4))) == ("kernel", "act_mul")
    assert table.table.rows()[0][0].kind is Kind.NATIVE


def test_composite_is_the_reference_and_keeps_the_reason() -> None:
    table = over(Vendor())
    out = table.bind(ACT)(ActMulArgs(x=torch.ones(1, 4)))
    torch.testing.assert_close(out, torch.full((1, 2), 0.731058578))
    (row, uses), *_ = table.table.rows()
    assert (row.kind, row.reason, uses) == (Kind.COMPOSITE, "not written yet", 1)


def test_no_is_an_error_with_operation_reason_and_remedy() -> None:
    table = over(Vendor(act_mul=Verdict.no("needs firmware 7")))
    with pytest.raises(UnsupportedError) as caught:
        table.bind(ACT)
    for word in ("act_mul(dtype=float32, size=2)", "bare", "needs firmware 7", "core doctor", "--quantization"):
        assert word in str(caught.value)
    assert [row.op for row in table.table.refused()] == [ACT]


def test_resolve_binds_and_counts_nothing() -> None:
    table = over(Vendor(act_mul=Verdict.no("no")))
    assert table.resolve(ACT).kind is Kind.NO and not table.table.rows()


def test_uses_are_counted() -> None:
    table = binder()
    for op in (ACT, NORM, ACT):
        table.bind(op)
    assert [(row.op.name, uses) for row, uses in table.table.rows()] == [("act_mul", 2), ("rms_norm", 1)]
    assert table.table.count(Kind.COMPOSITE) == 2 and table.table.count(Kind.NATIVE) == 0


# -- decompositions --------------------------------------------------------------------------------------------------


def test_parts_are_bound_natively_where_they_can_be() -> None:
    qk = QkNormRopeWriteOp(
        dtype=DType.FLOAT32,
        features=frozenset({"qk_norm"}),
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        v_head_dim=4,
        rotary_dim=4,
        kv_dtype=DType.FLOAT32,
    )
    row = over(Vendor(rope=Verdict.native())).resolve(qk)
    kinds = [(part.op.name, part.kind.value) for part in row.parts]
    assert kinds == [
        ("rms_norm", "COMPOSITE"),
        ("rms_norm", "COMPOSITE"),
        ("rope", "NATIVE"),
        ("kv_write", "COMPOSITE"),
    ]
    assert row.kind is Kind.COMPOSITE
    assert [item.op.name for item in row.flat()] == ["qk_norm_rope_write", "rms_norm", "rms_norm", "rope", "kv_write"]


def test_the_composition_calls_its_native_part() -> None:
    calls = []

    class Native(Vendor):
        def bind(self, op: OpSpec) -> Callable[..., Any]:
            def norm(args: RmsNormArgs) -> Any:
                calls.append(op)
                return "normed", "total"

            return norm

    from core.backend.ops import ReduceNormArgs

    fn = over(Native(rms_norm=Verdict.native())).bind(REDUCE)
    x = torch.zeros(1, 4)
    assert fn(ReduceNormArgs(partial=x, weight=x[0], residual=x)) == ("normed", "total")
    assert [op.features for op in calls] == [frozenset({"residual"})]


def test_a_coarse_kernel_is_preferred_to_its_parts() -> None:
    row = over(Vendor(reduce_norm=Verdict.native())).resolve(REDUCE)
    assert row.kind is Kind.NATIVE and row.parts == ()


def test_a_refused_part_refuses_the_whole_and_is_named() -> None:
    row = over(Vendor(rms_norm=Verdict.no("no norm here"))).resolve(REDUCE)
    assert row.kind is Kind.NO and row.reason == "its part rms_norm: no norm here"


def test_declared_parts_and_makers_take_the_same_names() -> None:
    assert set(DECOMPOSITIONS) <= set(COMPOSITES)


# -- determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", list(Determinism))
@pytest.mark.parametrize("given", list(Determinism))
def test_a_kernel_below_the_class_asked_for_is_not_used(given: Determinism, asked: Determinism) -> None:
    backend = Vendor(act_mul=Verdict.native(determinism=given))
    row = over(backend).resolve(dataclasses.replace(ACT, determinism=asked))
    assert row.kind is (Kind.NATIVE if given >= asked else Kind.COMPOSITE)
    if given < asked:
        assert given.name in row.reason and asked.name in row.reason


# -- private layouts -------------------------------------------------------------------------------------------------


class Private(Vendor):
    def kv_layout(self, spec: KVCacheSpec, block_size: int) -> KVLayout:
        plane = Plane(name="key", dtype=spec.dtype, block_shape=(block_size * spec.head_dim,))
        return KVLayout(id="vendor/swizzled", planes=(plane,), block_size=block_size)


WRITE = KvWriteOp(dtype=DType.FLOAT32, num_kv_heads=1, head_dim=4, v_head_dim=4, kv_dtype=DType.FLOAT32)


@pytest.mark.parametrize("op", [ATTENTION, WRITE, SAMPLES["mla"], SAMPLES["index_topk"]])
def test_composites_refuse_a_private_layout(op: OpSpec) -> None:
    row = over(Private()).resolve(op)
    assert row.kind is Kind.NO and "vendor/swizzled" in row.reason
    assert over(Private(**{op.name: Verdict.native()})).resolve(op).kind is Kind.NATIVE


@pytest.mark.parametrize("name", ["move_tokens", "export_blocks", "import_blocks"])
def test_operations_that_carry_a_private_layout_are_refused(name: str) -> None:
    op = dataclasses.replace(SAMPLES[name], layout=Private().kv_layout(ATTENTION.cache_spec, 4))  # type: ignore[call-arg]
    row = over(Private()).resolve(op)
    assert row.kind is Kind.NO and "vendor/swizzled" in row.reason
    assert over(Private()).resolve(SAMPLES[name]).kind is Kind.COMPOSITE


def test_a_private_layout_of_a_part_refuses_the_whole() -> None:
    assert over(Private()).resolve(SAMPLES["mla_prolog"]).kind is Kind.NO


def test_ragged_attention_has_no_cache_and_so_no_layout() -> None:
    ragged = dataclasses.replace(ATTENTION, features=frozenset({"ragged"}))
    assert over(Private()).resolve(ragged).kind is Kind.COMPOSITE


def test_a_canonical_layout_is_composed() -> None:
    assert over(Vendor()).resolve(ATTENTION).kind is Kind.COMPOSITE


# -- versions --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, kw_only=True)
class FutureArgs(Args):
    """Run-time tensors of an operation that grew in minor 2."""

    x: torch.Tensor
    extra: torch.Tensor | None = optional("extra", minor=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureOp(OpSpec):
    """An operation of a later contract."""

    name: ClassVar[str] = "future"
    args: ClassVar[type[Args]] = FutureArgs
    tilt: float = since(1, 0.0)


def test_what_came_later_is_no_without_a_call() -> None:
    backend = Vendor(future=Verdict.native())
    for op in (
        FutureOp(dtype=DType.FLOAT32, tilt=1.0),
        FutureOp(dtype=DType.FLOAT32, features=frozenset({"extra"})),
    ):
        verdict = judge(backend, INFO, op, DEVICE)
        assert verdict.kind is Kind.NO and ("tilt" in verdict.reason or "extra" in verdict.reason)
        assert "contract 1.0" in verdict.reason and "upgrade" in verdict.reason
    assert backend.asked == []


def test_an_operation_that_came_later_is_composed_without_a_call() -> None:
    class LaterOp(FutureOp):
        minor = 1

    backend = Vendor(future=Verdict.native())
    verdict = judge(backend, INFO, LaterOp(dtype=DType.FLOAT32), DEVICE)
    assert verdict.kind is Kind.COMPOSITE and "contract 1.0" in verdict.reason
    assert backend.asked == []
    newer = dataclasses.replace(INFO, api=(1, 0, 1))
    assert judge(backend, newer, LaterOp(dtype=DType.FLOAT32), DEVICE).kind is Kind.NATIVE


def test_defaults_of_later_fields_are_asked_as_ever() -> None:
    backend = Vendor(future=Verdict.native())
    assert judge(backend, INFO, FutureOp(dtype=DType.FLOAT32), DEVICE).kind is Kind.NATIVE
    newer = dataclasses.replace(INFO, api=(1, 0, 2))
    op = FutureOp(dtype=DType.FLOAT32, tilt=1.0, features=frozenset({"extra"}))
    assert judge(backend, newer, op, DEVICE).kind is Kind.NATIVE
    assert newer_fields(op, 0) == ["tilt", "extra"] and newer_fields(op, 1) == ["extra"]
    assert newer_fields(op, 2) == []


def test_the_contracts_own_registry_ignores_others_operations() -> None:
    from core.backend.ops import OPERATIONS

    assert "future" not in OPERATIONS


@pytest.mark.parametrize(
    ("api", "words"),
    [
        ((CONTRACT_VERSION[0] + 1, 0, 3), ["bare", f"contract {CONTRACT_VERSION[0] + 1}.3", "install"]),
        ((CONTRACT_VERSION[0], CONTRACT_VERSION[1] + 1, 9), [f"needs contract {CONTRACT_VERSION[0]}.", "upgrade"]),
    ],
)
def test_a_backend_of_another_contract_is_named_with_a_remedy(api: tuple[int, int, int], words: list[str]) -> None:
    info = dataclasses.replace(INFO, api=api)
    with pytest.raises(ContractVersionError) as caught:
        Binder(opened(), info, DEVICE, block_size=4)
    assert all(word in str(caught.value) for word in words)


def test_a_backend_built_for_a_later_minor_runs_where_it_needs_none() -> None:
    check_api(BackendInfo(name="x", vendor="x", api=(CONTRACT_VERSION[0], 0, CONTRACT_VERSION[1] + 5), load="x:X"))


# -- the table -------------------------------------------------------------------------------------------------------


def table_of(ops: list[OpSpec], **verdicts: Verdict) -> str:
    filled = over(Vendor(**verdicts))
    for op in ops:
        filled.bind(op)
    return filled.table.hash


def test_the_hash_is_stable_and_sees_every_change() -> None:
    base = table_of([ACT, NORM, REDUCE])
    assert base == table_of([ACT, NORM, REDUCE]) == table_of([REDUCE, NORM, ACT])
    assert len(base) == 16 and int(base, 16) >= 0
    others = {
        table_of([ACT, NORM]),
        table_of([ACT, ACT, NORM, REDUCE]),
        table_of([ACT, NORM, REDUCE], act_mul=Verdict.native()),
        table_of([ACT, NORM, REDUCE], act_mul=Verdict.composite("other words")),
        table_of([dataclasses.replace(ACT, size=3), NORM, REDUCE]),
        table_of([ACT, dataclasses.replace(NORM, features=frozenset({"residual"})), REDUCE]),
    }
    assert len(others) == 6 and base not in others


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_hash_is_the_same_in_another_process(hash_seed: str) -> None:
    code = "import test_negotiate as t; print(t.table_of([t.ACT, t.NORM, t.WIDE, t.REDUCE]), end='')"
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parents[2])))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == table_of([ACT, NORM, WIDE, REDUCE])

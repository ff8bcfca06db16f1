"""SIMULATED: kernels, models and the whole engine through the real backend classes, in Triton's interpreter.

A choice of checks that fits into a test run; `nox -s simulated` runs many more. They prove arithmetic, addresses,
plans, launches and recorded steps; not races, barriers, speed, drivers or collectives.
"""

from __future__ import annotations

import pytest
import torch
from simulated import failures, outcomes, planted, simulated

from core.backend import Packed
from core.backend.ops import LinearArgs, LinearOp
from core.backend.reference import COMPOSITES
from core.spec import DType
from core_conformance.engines.rig import engine, golden_set
from core_conformance.subject import Mismatch, Subject
from core_conformance.suite.test_l1_attention import attention_op, check_attention

CHOICE = {
    ("cuda", "sm_90"): (
        "L2/logits/qwen3-block-plus-1-bf16",
        "L2/chunks/gemma3-bf16",
        "L2/quantized/fp8-bf16",
        "L3/greedy/llama",
        "L3/preemption/swap-copy",
    ),
    ("cuda", "sm_80"): ("L2/quantized/fp8-bf16",),
    ("rocm", "gfx942"): ("L2/mixed/mistral-bf16", "L2/quantized/fp8-bf16", "L3/greedy-half/copy"),
    ("rocm", "gfx950"): ("L2/quantized/fp8-bf16", "L3/greedy-half/copy"),
}
"""Some of each level. The two AMD chips have different 8-bit floats, and one NVIDIA chip has none."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("device", "arch"), CHOICE, ids=lambda value: value)
def test_models_answer_as_the_reference_does(device: str, arch: str) -> None:
    assert failures(outcomes(device, arch, CHOICE[device, arch])) == {}


@pytest.mark.parametrize(("device", "arch"), [("cuda", "sm_90"), ("rocm", "gfx942")], ids=lambda value: value)
def test_the_methods_keep_the_contract(device: str, arch: str) -> None:
    ids = (
        "L0/arena-round-trip",
        "L0/capture-replay",
        "L0/copy-blocks",
        "L0/kv-layout",
        "L0/memory",
        "L0/supports-pure",
    )
    assert failures(outcomes(device, arch, ids)) == {}


BUGS = {
    "off-by-one mask": (
        "attention", "attention_kernel", "keys[None, :] <= position[:, None]", "keys[None, :] < position[:, None]",
        "L1/attention/decode-gqa-fp32",
    ),
    "wrong head map": (
        "attention", "attention_kernel", "head = kv_head * GROUP + rows % GROUP",
        "head = kv_head + rows % GROUP * tl.num_programs(1)", "L1/attention/head-map-4x2-fp32",
    ),
}  # fmt: skip
"""What is planted (module, kernel, right, wrong) and the check that must see it."""


@pytest.mark.parametrize(("device", "arch"), [("cuda", "sm_90"), ("rocm", "gfx942")], ids=lambda value: value)
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_planted_in_a_kernel_is_caught(device: str, arch: str, bug: str) -> None:
    module, kernel, right, wrong, check = BUGS[bug]
    assert failures(outcomes(device, arch, [check])) == {}, "the check fails without the bug too"
    with planted(module, kernel, right, wrong):
        assert set(failures(outcomes(device, arch, [check]))) == {check}


@pytest.mark.parametrize(("device", "arch"), [("cuda", "sm_90"), ("rocm", "gfx942")], ids=lambda value: value)
def test_a_missing_shift_of_exponent_scales_is_caught(device: str, arch: str) -> None:
    """Blocks of 128 x 128 with scales of one exponent byte each (UE8M0), as DeepSeek-V3.1 has them."""
    with simulated(device, arch) as target:
        op = LinearOp(dtype=DType.BFLOAT16, in_features=256, out_features=160, scheme="fp8_block")
        args = _exponent_scaled(op)
        exact = COMPOSITES["linear"](op)(args).float()
        assert _error(target.backend.bind(op)(args), exact) < 0.02
        with planted("formats", "power_of_two", "wide << 23", "wide"):
            assert not _error(target.backend.bind(op)(args), exact) < 0.02


def _exponent_scaled(op: LinearOp) -> LinearArgs:
    """Weights of either sign over scales from 2^-9 to 2^-2, so that no scale can be left out unseen."""
    drawn = torch.Generator().manual_seed(7)
    weight = torch.randn(op.out_features, op.in_features, generator=drawn).to(torch.float8_e4m3fn)
    rows, cols = -(-op.out_features // 128), -(-op.in_features // 128)
    scale = torch.randint(118, 126, (rows, cols), generator=drawn, dtype=torch.uint8)
    packed = Packed(
        shape=(op.out_features, op.in_features), scheme="fp8_block", tensors={"weight": weight, "scale": scale}
    )
    return LinearArgs(x=torch.randn(5, op.in_features, generator=drawn).bfloat16(), weight=packed)


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in root mean square."""
    return float((got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize(("device", "arch"), [("cuda", "sm_90"), ("rocm", "gfx942")], ids=lambda value: value)
def test_a_dropped_rescale_is_caught(device: str, arch: str) -> None:
    """Four tiles of keys: what was summed before the peak rose must shrink."""
    op, lens = attention_op(DType.FLOAT32), ([1], [100])
    with simulated(device, arch) as target:
        check_attention(Subject(target), op, *lens)
        dropped = ("attention", "attention_kernel", "summed * rescale[:, None] + tl.dot(", "summed + tl.dot(")
        with planted(*dropped), pytest.raises(Mismatch):
            check_attention(Subject(target), op, *lens)


@pytest.mark.parametrize(("device", "arch"), [("cuda", "sm_90"), ("rocm", "gfx942")], ids=lambda value: value)
def test_long_contexts_are_cut_into_parts_and_joined(device: str, arch: str) -> None:
    """More keys than the suite's lengths at this block size: many tiles a part, and several parts of one request."""
    with simulated(device, arch) as target:
        check_attention(Subject(target), attention_op(DType.BFLOAT16), [1, 1], [40, 700])


def test_decode_steps_are_recorded_and_replayed() -> None:
    """Greedy tokens are those of the reference though nearly every step ran no Python of the model."""
    with simulated("cuda", "sm_90") as target, engine(Subject(target), "copy") as rig:
        golden = golden_set("copy", rig.block_size, 10)[0]
        assert rig.run([golden.prompt], max_tokens=len(golden.tokens)) == [golden.tokens]
        assert rig.runner.graphs.num_replays >= len(golden.tokens) - 2
        assert rig.runner.graphs.sizes == [(1, 1)]

"""Kernels outside the cache, in the interpreter, where the conformance suite does not look: tiling, formats, limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from core_triton import interpreter

interpreter.install()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from core.backend import Packed  # noqa: E402
from core.backend import ops as o  # noqa: E402
from core.backend import philox as shared  # noqa: E402
from core.backend.reference.registry import COMPOSITES  # noqa: E402
from core.backend.schemes import SCHEMES, quantize_fp8_block, quantize_rows  # noqa: E402
from core.spec import DType  # noqa: E402
from core_triton import ops, registry  # noqa: E402
from core_triton.kernels.formats import decode_e4m3, encode_e4m3  # noqa: E402
from core_triton.kernels.philox import gumbel  # noqa: E402
from core_triton.ops.products import form_of  # noqa: E402
from core_triton.packing import fnuz_parts, suited  # noqa: E402
from core_triton.target import TARGETS, interpreted  # noqa: E402

ops.load()

OWN = (
    "act_mul", "advance", "apply_token_bitmask", "embed", "experts", "linear", "reduce_norm", "rejection_sample",
    "rms_norm", "route", "sample",
)  # fmt: skip


def bound(op: Any, arch: str = "sm_90") -> Any:
    return registry.bind(op, interpreted(arch))


def linear_op(k: int, n: int, **changes: Any) -> o.LinearOp:
    wide = DType.FLOAT32
    return o.LinearOp(dtype=wide, in_features=k, out_features=n, weight_dtype=wide, out_dtype=wide, **changes)


@triton.jit
def _decode(bits, out, FNUZ: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, decode_e4m3(tl.load(bits + at), FNUZ).to(tl.float32))


@triton.jit
def _encode(x, bits, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(bits + at, encode_e4m3(tl.load(x + at)))


@triton.jit
def _gumbel(out, seed, position, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, gumbel(tl.load(seed), tl.load(position), at, 2))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=["fn", "fnuz"])
def test_every_byte_of_e4m3_decodes_to_its_value(kind: torch.dtype) -> None:
    bits, out = torch.arange(256).to(torch.uint8), torch.empty(256)
    _decode[(1,)](bits, out, kind == torch.float8_e4m3fnuz)
    values = bits.view(kind).float()
    numbers = ~values.isnan()
    assert torch.equal(out[numbers], values[numbers]) and int(numbers.sum()) >= 254


def test_encoding_rounds_as_a_cast_does_and_saturates() -> None:
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0)
    middles = (every[:, None] + every[None, :]).flatten()[:8192] / 2
    x = torch.cat((middles, middles * (1 + 2.0**-20), torch.tensor([1e9, -1e9, 449.0, 2.0**-10, -(2.0**-11)])))
    x = torch.nn.functional.pad(x, (0, 32768 - len(x)))
    bits = torch.empty(32768, dtype=torch.uint8)
    _encode[(1,)](x, bits, 32768)
    assert torch.equal(bits.view(torch.float8_e4m3fn).float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert not bool((bits == 0x80).any()), "minus zero is NaN where bytes are read as fnuz"


def test_random_numbers_are_those_of_the_contract() -> None:
    out, seed, position = torch.empty(2048), torch.tensor([-(2**61) + 12345]), torch.tensor([77], dtype=torch.int32)
    _gumbel[(1,)](out, seed, position, 2048)
    expected = shared.gumbel(seed, position.long(), torch.arange(2048), 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [16, 17])
def test_a_long_sum_cut_in_shares_is_the_sum(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 1300, generator=generator), torch.randn(40, 1300, generator=generator)
    bias = torch.randn(40, generator=generator)
    packed = Packed(shape=weight.shape, scheme="none", tensors={"weight": weight})
    run = bound(linear_op(1300, 40, features=frozenset({"bias"})))
    out = run(o.LinearArgs(x=x, weight=packed, bias=bias))
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T + bias.double(), rtol=1e-5, atol=1e-4)


def test_few_tiles_are_cut_along_k_unless_rows_must_keep_their_bits() -> None:
    from core.backend.ops import Determinism
    from core_triton.ops.linear import Linear

    weight = Packed(shape=(64, 4096), scheme="none", tensors={"weight": torch.empty(64, 4096, dtype=torch.bfloat16)})
    form = form_of(torch.empty(1, 4096, dtype=torch.bfloat16), weight, TARGETS["sm_90"])
    tuning = form.tuned(TARGETS["sm_90"])["decode"]
    shares = {}
    for level in (Determinism.D1, Determinism.D3):
        op = o.LinearOp(dtype=DType.BFLOAT16, determinism=level, in_features=4096, out_features=64)
        shares[level] = Linear(op, interpreted("sm_90"))._share(form, tuning, 1)
    assert shares[Determinism.D1] == 512 and shares[Determinism.D3] == 4096


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_fnuz_weights_stand_for_the_same_values(kind: torch.dtype) -> None:
    weight, _ = quantize_fp8_block(torch.randn(130, 140))
    weight.view(torch.uint8)[0, 0] = 0x80
    exponents = torch.tensor([[120, 127], [126, 128]], dtype=torch.uint8)
    powers = torch.pow(2.0, exponents.float() - 127)
    scale = exponents.view(kind) if kind.itemsize == 1 else powers.to(kind)
    turned, doubled = fnuz_parts(weight, scale)
    assert turned.dtype == torch.float8_e4m3fnuz and doubled.dtype == scale.dtype
    dequantize = SCHEMES["fp8_block"].dequantize
    same = dequantize({"weight": turned, "scale": doubled}), dequantize({"weight": weight, "scale": scale})
    assert torch.equal(same[0], same[1])


def test_products_in_eight_bits_on_a_chip_that_has_the_fnuz_form_only() -> None:
    generator = torch.Generator().manual_seed(9)
    x, dense = torch.randn(3, 256, generator=generator), torch.randn(48, 256, generator=generator)
    weight, scale = quantize_fp8_block(dense)
    plain = Packed(shape=dense.shape, scheme="fp8_block", tensors={"weight": weight, "scale": scale})
    packed = suited(plain, TARGETS["gfx942"])
    assert packed.input_format == "fp8_block128"
    act = quantize_rows(x, "fp8_block128")
    act.q.view(torch.uint8)[0, :8] = 0x80
    out = bound(linear_op(256, 48, scheme="fp8_block"), "gfx942")(o.LinearArgs(x=act, weight=packed))
    values = act.q.double() * act.scale.double().repeat_interleave(128, dim=1)
    torch.testing.assert_close(out.double(), values @ plain.dense().double().T, rtol=1e-5, atol=1e-4)


def test_a_tie_at_the_edge_of_top_k_keeps_the_lower_ids() -> None:
    op = o.SampleOp(dtype=DType.FLOAT32, vocab_size=50, features=frozenset({"top_k"}))
    logits = torch.full((12, 50), -4.0)
    logits[:, [7, 11, 30, 49]] = 2.0
    args = o.SampleArgs(
        logits=logits,
        temperature=torch.ones(12),
        seeds=torch.arange(12),
        positions=torch.zeros(12, dtype=torch.int32),
        top_k=torch.full((12,), 2, dtype=torch.int32),
    )
    assert set(bound(op)(args).tolist()) == {7, 11}


def test_experts_of_nobody_leave_zeros() -> None:
    op = o.ExpertsOp(dtype=DType.FLOAT32, num_experts=2, hidden_size=16, intermediate_size=16, top_k=2, first_expert=4)
    shapes = (2, 32, 16), (2, 16, 16)
    gate_up, down = (Packed(shape=s, scheme="none", tensors={"weight": torch.ones(s)}) for s in shapes)
    ids = torch.tensor([[0, 3], [6, -1]], dtype=torch.int32)
    args = o.ExpertsArgs(x=torch.ones(2, 16), gate_up=gate_up, down=down, weights=torch.ones(2, 2), expert_ids=ids)
    assert torch.equal(bound(op)(args), torch.zeros(2, 16))


@pytest.mark.parametrize("name", OWN)
def test_what_is_refused_says_why(name: str) -> None:
    from core_conformance.operations.samples import SAMPLES

    target = TARGETS["sm_90"]
    assert registry.verdict(SAMPLES[name], target).kind == "NATIVE" and name in COMPOSITES
    answer = registry.verdict(dataclasses.replace(SAMPLES[name], features=frozenset({"no_such_feature"})), target)
    assert answer.kind == "COMPOSITE" and "no_such_feature" in answer.reason


def test_gguf_weights_and_several_ranks_are_composed_with_a_reason() -> None:
    target = TARGETS["gfx942"]
    assert "dequantized at load" in registry.verdict(linear_op(256, 8, scheme="q4_k"), target).reason
    norm = o.ReduceNormOp(dtype=DType.BFLOAT16, dim=64, eps=1e-6, world=2)
    assert "collective" in registry.verdict(norm, target).reason


@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_every_kernel_has_builds_whose_arguments_are_those_of_the_kernel(arch: str) -> None:
    for name in OWN:
        builds = registry.KERNELS[name].builds(TARGETS[arch])
        assert builds and len({build.label for build in builds}) == len(builds)
        for build in builds:
            given = {*build.signature, *build.constexprs}
            assert given == set(build.kernel.arg_names), f"{build.label}: {given ^ set(build.kernel.arg_names)}"
            assert not set(build.signature) & set(build.constexprs) and set(build.divisible) <= set(build.signature)

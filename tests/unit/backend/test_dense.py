"""Dense operations of the reference against transformers' modules and float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bare import bound
from paged import dtype_of, i32
from torch import Tensor

from core.backend import SCHEMES, Packed, Quantized
from core.backend import schemes as weight_schemes
from core.backend.ops import (
    ActMulArgs,
    ActMulOp,
    Determinism,
    EmbedArgs,
    EmbedOp,
    LinearArgs,
    LinearOp,
    RmsNormArgs,
    RmsNormOp,
    RopeArgs,
    RopeOp,
)
from core.spec import DType

UNIT = {DType.FLOAT64: 1e-13, DType.FLOAT32: 2.0**-24, DType.BFLOAT16: 2.0**-9, DType.FLOAT16: 2.0**-12}
"""Half the distance of neighbours, relative."""
FLOATS = list(UNIT)


def rounded_once(got: Tensor, exact: Tensor, dtype: DType, slack: float = 1.1) -> None:
    """Asserts that `got` is `exact` with one rounding to `dtype`, float32 arithmetic granted."""
    assert got.dtype == dtype_of(dtype)
    error = (got.double() - exact).abs()
    bound_ = slack * 2 * UNIT[dtype] * exact.abs() + 2e-6 * exact.abs().amax() * (dtype is not DType.FLOAT64) + 1e-11
    assert (error <= bound_).all(), (error / bound_).max()


def dense_packed(weight: Tensor) -> Packed:
    return Packed(shape=weight.shape, scheme="none", tensors={"weight": weight})


QUANTIZERS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "int8": weight_schemes.quantize_int8,
    "fp8_tensor": weight_schemes.quantize_fp8_tensor,
    "fp8_channel": weight_schemes.quantize_fp8_channel,
    "fp8_block": weight_schemes.quantize_fp8_block,
    "int4_group": lambda weight: weight_schemes.quantize_int4_group(weight, 64),
}


def quantized_packed(scheme: str, weight: Tensor) -> Packed:
    parts = zip(SCHEMES[scheme].parts, QUANTIZERS[scheme](weight), strict=True)
    return Packed(shape=weight.shape, scheme=scheme, tensors=dict(parts))


def gguf_packed(scheme: str, rows: int, blocks: int) -> Packed:
    """A weight of random blocks with tame scales: halves below one."""
    elements, num_bytes, _ = weight_schemes.GGUF_BLOCKS[scheme]
    data = torch.randint(0, 256, (rows, blocks, num_bytes), dtype=torch.uint8)
    halves = {"q8_0": [0], "q4_0": [0], "q5_0": [0], "q6_k": [208]}.get(scheme, [0, 2])
    for at in halves:
        data[..., at + 1] = (data[..., at + 1] & 0x83) | 0x20
    return Packed(shape=(rows, blocks * elements), scheme=scheme, tensors={"weight": data.view(rows, -1)})


# -- embed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_embed_gathers_rows(dtype: DType) -> None:
    table = torch.randn(7, 5).to(dtype_of(dtype))
    ids = i32([3, 0, 6, 3])
    out = bound(EmbedOp(dtype=dtype, dim=5))(EmbedArgs(token_ids=ids, weight=dense_packed(table)))
    assert torch.equal(out, table[ids.long()])


def test_embed_multiplies_as_gemma_does() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    module = Gemma3TextScaledWordEmbedding(11, 6, 0, embed_scale=6**0.5).to(torch.bfloat16)
    op = EmbedOp(dtype=DType.BFLOAT16, dim=6, multiplier=6**0.5)
    out = bound(op)(EmbedArgs(token_ids=i32([1, 10, 4]), weight=dense_packed(module.weight)))
    assert torch.equal(out, module(torch.tensor([1, 10, 4])))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_embed_dequantizes_the_gathered_rows(scheme: str) -> None:
    if scheme == "none":
        weight = dense_packed(torch.randn(300, 256))
    elif scheme in QUANTIZERS:
        weight = quantized_packed(scheme, torch.randn(300, 256 if scheme == "int4_group" else 200))
    else:
        weight = gguf_packed(scheme, 300, 2)
    ids = i32([299, 0, 128, 127, 5, 5])
    op = EmbedOp(dtype=DType.FLOAT32, dim=weight.shape[1], scheme=scheme)
    out = bound(op)(EmbedArgs(token_ids=ids, weight=weight))
    assert torch.equal(out, weight.dense()[ids.long()])


class Transposed(Packed):
    """A backend's private form."""

    def dense(self) -> Tensor:
        return self.tensors()["private"].mT.float()


def test_embed_reads_a_private_form_through_dense() -> None:
    table = torch.randn(9, 4)
    weight = Transposed(shape=(9, 4), scheme="fp8_channel", tensors={"private": table.T.contiguous()})
    out = bound(EmbedOp(dtype=DType.FLOAT32, dim=4, scheme="fp8_channel"))(EmbedArgs(token_ids=i32([8]), weight=weight))
    assert torch.equal(out, table[8:])


@pytest.mark.parametrize("scheme", ["int8", "fp8_channel"])
def test_linear_reads_a_private_form_through_dense(scheme: str) -> None:
    weight = quantized_packed(scheme, torch.randn(9, 40))
    private = Transposed(shape=(9, 40), scheme=scheme, tensors={"private": weight.dense().T.contiguous()})
    op = LinearOp(dtype=DType.FLOAT32, in_features=40, out_features=9, scheme=scheme, out_dtype=DType.FLOAT32)
    linear, x = bound(op), torch.randn(3, 40)
    public = linear(LinearArgs(x=x, weight=weight))
    torch.testing.assert_close(linear(LinearArgs(x=x, weight=private)), public, rtol=1e-5, atol=1e-5)


# -- linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("determinism", [Determinism.D0, Determinism.D3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_linear_dense(dtype: DType, bias: bool, determinism: Determinism) -> None:
    kind = dtype_of(dtype)
    x, weight = torch.randn(5, 40).to(kind), torch.randn(12, 40).to(kind)
    extra = torch.randn(12).to(kind) if bias else None
    op = LinearOp(
        dtype=dtype,
        features=frozenset({"bias"} if bias else ()),
        determinism=determinism,
        in_features=40,
        out_features=12,
        weight_dtype=dtype,
        out_dtype=dtype,
    )
    out = bound(op)(LinearArgs(x=x, weight=dense_packed(weight), bias=extra))
    exact = x.double() @ weight.double().T + (0.0 if extra is None else extra.double())
    rounded_once(out, exact, dtype)


def test_linear_head_gives_float32_of_bfloat16_without_a_rounding_between() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    op = LinearOp(dtype=DType.BFLOAT16, in_features=64, out_features=9, out_dtype=DType.FLOAT32)
    out = bound(op)(LinearArgs(x=x, weight=dense_packed(weight)))
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - {"none", "int8"}))
def test_linear_multiplies_the_dequantized_weight(scheme: str) -> None:
    weight = quantized_packed(scheme, torch.randn(150, 256)) if scheme in QUANTIZERS else gguf_packed(scheme, 30, 2)
    n, k = weight.shape
    x = torch.randn(4, k, dtype=torch.float64)
    op = LinearOp(dtype=DType.FLOAT64, in_features=k, out_features=n, scheme=scheme, out_dtype=DType.FLOAT64)
    out = bound(op)(LinearArgs(x=x, weight=weight))
    torch.testing.assert_close(out, x @ weight.dense().double().T, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("k", [7, 1024, 3000])
def test_linear_int8_is_exact_between_integers(k: int) -> None:
    x = torch.randn(5, k) * torch.tensor([[1.0], [100.0], [1e-3], [0.0], [3.0]])
    q, scale = weight_schemes.quantize_int8(torch.randn(6, k))
    weight = Packed(shape=(6, k), scheme="int8", tensors={"weight": q, "scale": scale})
    op = LinearOp(dtype=DType.FLOAT32, in_features=k, out_features=6, scheme="int8", out_dtype=DType.FLOAT32)
    out = bound(op)(LinearArgs(x=x, weight=weight)).numpy()
    for t in range(5):
        row = x[t].numpy()
        step = np.float32(np.abs(row).max() / np.float32(127))
        ints = np.rint(row / step).astype(np.int64) if step else np.zeros(k, np.int64)
        for n in range(6):
            expected = np.float32(ints @ q[n].numpy().astype(np.int64)) * step * np.float32(scale[n, 0])
            assert abs(out[t, n] - expected) <= 2e-7 * abs(expected)


def test_linear_int8_extremes_do_not_overflow_float32() -> None:
    k = 4096
    weight = Packed(
        shape=(1, k),
        scheme="int8",
        tensors={"weight": torch.full((1, k), -128, dtype=torch.int8), "scale": torch.ones(1, 1)},
    )
    x = torch.full((1, k), 127.0)
    x[0, 0] = 1.0
    op = LinearOp(dtype=DType.FLOAT64, in_features=k, out_features=1, scheme="int8", out_dtype=DType.FLOAT64)
    assert bound(op)(LinearArgs(x=x, weight=weight)).item() == -128 * (127 * (k - 1) + 1)


@pytest.mark.parametrize(
    ("form", "scheme"),
    [("int8_row", "int8"), ("int8_row", "fp8_channel"), ("fp8_row", "fp8_channel"), ("fp8_block128", "fp8_block")],
)
def test_linear_takes_a_quantized_activation(form: str, scheme: str) -> None:
    x = torch.randn(3, 200)
    act = weight_schemes.quantize_rows(x, form)
    assert isinstance(act, Quantized)
    weight = quantized_packed(scheme, torch.randn(10, 200))
    op = LinearOp(dtype=DType.FLOAT32, in_features=200, out_features=10, scheme=scheme, out_dtype=DType.FLOAT32)
    out = bound(op)(LinearArgs(x=act, weight=weight))
    columns = act.scale.repeat_interleave(128, 1)[:, :200] if form == "fp8_block128" else act.scale
    values = act.q.double() * columns.double()
    assert (values - x).abs().max() <= 0.07 * x.abs().max()
    torch.testing.assert_close(out.double(), values @ weight.dense().double().T, rtol=1e-4, atol=1e-4)
    if scheme == "int8":
        assert torch.equal(out, bound(op)(LinearArgs(x=x, weight=weight)))


def test_linear_rows_do_not_show_in_each_other_in_class_d2() -> None:
    x, weight = torch.randn(9, 333), torch.randn(65, 333)
    op = LinearOp(
        dtype=DType.FLOAT32,
        determinism=Determinism.D2,
        in_features=333,
        out_features=65,
        weight_dtype=DType.FLOAT32,
        out_dtype=DType.FLOAT32,
    )
    linear = bound(op)
    whole = linear(LinearArgs(x=x, weight=dense_packed(weight)))
    for start, end in ((0, 1), (1, 4), (4, 9)):
        assert torch.equal(linear(LinearArgs(x=x[start:end], weight=dense_packed(weight))), whole[start:end])
    assert linear(LinearArgs(x=x[:0], weight=dense_packed(weight))).shape == (0, 65)


# -- rms_norm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rms_norm_equals_transformers(family: str) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module: Any = LlamaRMSNorm(48, 1e-5) if family == "llama" else Gemma3RMSNorm(48, 1e-5)
    module.weight.copy_(torch.randn(48))
    op = RmsNormOp(dtype=DType.FLOAT32, dim=48, eps=1e-5, weight_offset=0.0 if family == "llama" else 1.0)
    x = torch.randn(3, 2, 48) * 5
    torch.testing.assert_close(bound(op)(RmsNormArgs(x=x, weight=module.weight)), module(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_is_rounded_once(dtype: DType, weight_dtype: torch.dtype | None) -> None:
    x = torch.randn(6, 32).to(dtype_of(dtype))
    weight = torch.randn(32).to(weight_dtype or dtype_of(dtype))
    out = bound(RmsNormOp(dtype=dtype, dim=32, eps=0.1, weight_offset=1.0))(RmsNormArgs(x=x, weight=weight))
    wide = x.double()
    rounded_once(out, wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * (1 + weight.double()), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_adds_the_residual_first(dtype: DType) -> None:
    kind = dtype_of(dtype)
    x, residual, weight = torch.randn(4, 16).to(kind), torch.randn(4, 16).to(kind), torch.randn(16).to(kind)
    op = RmsNormOp(dtype=dtype, dim=16, eps=1e-6, features=frozenset({"residual"}))
    out, total = bound(op)(RmsNormArgs(x=x.clone(), weight=weight, residual=residual.clone()))
    assert torch.equal(total, x + residual)
    plain = bound(RmsNormOp(dtype=dtype, dim=16, eps=1e-6))(RmsNormArgs(x=total, weight=weight))
    assert torch.equal(out, plain)


# -- act_mul ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")]
)
def test_act_mul_equals_transformers_activations(activation: Any, name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.randn(5, 14, dtype=torch.float64) * 4
    out = bound(ActMulOp(dtype=DType.FLOAT64, size=7, activation=activation))(ActMulArgs(x=x))
    torch.testing.assert_close(out, ACT2FN[name](x[:, :7]) * x[:, 7:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
def test_act_mul_is_rounded_once(dtype: DType) -> None:
    x = torch.randn(5, 14).to(dtype_of(dtype))
    wide = x.double()
    exact = wide[:, :7] / (1 + (-wide[:, :7]).exp()) * wide[:, 7:]
    rounded_once(bound(ActMulOp(dtype=dtype, size=7))(ActMulArgs(x=x)), exact, dtype)


# -- rope ------------------------------------------------------------------------------------------------------------


def angles(max_position: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    rates = 100.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    return (torch.arange(max_position).double()[:, None] * rates).cos(), (
        torch.arange(max_position).double()[:, None] * rates
    ).sin()


def rope_op(rotary_dim: int, dtype: DType, interleaved: bool = False) -> RopeOp:
    return RopeOp(dtype=dtype, num_heads=3, num_kv_heads=2, head_dim=8, rotary_dim=rotary_dim, interleaved=interleaved)


def test_rope_equals_llama() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = angles(40, 8)
    positions = i32([0, 39, 7, 7])
    query, key = torch.randn(4, 3, 8), torch.randn(4, 2, 8)
    table = torch.cat((cos, sin), -1).float()
    out = bound(rope_op(8, DType.FLOAT32))(RopeArgs(query=query, key=key, positions=positions, cos_sin=table))
    rows = positions.long()
    full = [torch.cat((part[rows], part[rows]), -1).float()[None] for part in (cos, sin)]
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], *full)
    for got, want in zip(out, expected, strict=True):
        torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rope_turns_pairs_as_complex_numbers(rotary_dim: int, interleaved: bool) -> None:
    cos, sin = angles(16, rotary_dim)
    table = torch.cat((cos, sin), -1).float()
    positions = i32([3, 15])
    query, key = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 2, 8, dtype=torch.float64)
    args = RopeArgs(query=query, key=key, positions=positions, cos_sin=table)
    half = rotary_dim // 2
    for x, got in zip((query, key), bound(rope_op(rotary_dim, DType.FLOAT64, interleaved))(args), strict=True):
        expected = x.clone()
        for t in range(2):
            for h in range(x.shape[1]):
                for i in range(half):
                    a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                    row = table[int(positions[t])].double()
                    turned = complex(x[t, h, a], x[t, h, b]) * complex(row[i], row[half + i])
                    expected[t, h, a], expected[t, h, b] = turned.real, turned.imag
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_rope_leaves_strided_inputs_as_they_are() -> None:
    fused = torch.randn(2, 5 * 8).bfloat16()
    before = fused.clone()
    cos, sin = angles(8, 8)
    args = RopeArgs(
        query=fused[:, :24].unflatten(1, (3, 8)),
        key=fused[:, 24:].unflatten(1, (2, 8)),
        positions=i32([1, 2]),
        cos_sin=torch.cat((cos, sin), -1).float(),
    )
    query, key = bound(rope_op(8, DType.BFLOAT16))(args)
    assert query.dtype == key.dtype == torch.bfloat16
    assert torch.equal(fused, before)

"""rms_norm, act_mul, rope and token bitmasks against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from kernel_bounds import UNIT
from torch import Tensor

from core_cpu import kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(got: Tensor, ref: Tensor, units: float = 4.0) -> None:
    """Equal up to rounding to the type of `got` and a few float32 roundings."""
    bound = UNIT[got.dtype] * ref.abs() + units * UNIT[torch.float32] * (ref.abs() + 1)
    assert ((got.double() - ref).abs() <= bound).all()


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (5, 576), (3, 77), (0, 32), (40, 1024)])
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype, rows: int, dim: int, weight_dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, dim).to(dtype), torch.randn(dim).to(weight_dtype)
    close(kernels.rms_norm(x, weight, 1e-5), norm(x, weight, 1e-5, 0.0), 16)
    close(kernels.rms_norm(x, weight, 1e-6, offset=1.0), norm(x, weight, 1e-6, 1.0), 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_residual_norms_the_rounded_sum_and_keeps_it(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(9, 200).to(dtype), torch.randn(9, 200).to(dtype), torch.randn(200).to(dtype)
    total = (x.float() + residual.float()).to(dtype)
    got = kernels.rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(residual, total)
    close(got, norm(total, weight, 1e-5, 0.0), 16)


def test_rms_norm_of_heads_inside_a_fused_row_in_place() -> None:
    fused = torch.randn(7, 512).bfloat16()
    before = fused.clone()
    heads = fused[:, 128:384].unflatten(1, (4, 64))
    weight = torch.randn(64).bfloat16()
    kernels.rms_norm(heads, weight, 1e-6, out=heads)
    close(heads, norm(before[:, 128:384].unflatten(1, (4, 64)), weight, 1e-6, 0.0), 16)
    assert torch.equal(fused[:, :128], before[:, :128])
    assert torch.equal(fused[:, 384:], before[:, 384:])


def test_rms_norm_of_zeros_is_zero_by_its_eps_and_nan_stays_nan() -> None:
    assert (kernels.rms_norm(torch.zeros(2, 48), torch.ones(48), 1e-6) == 0).all()
    x = torch.randn(2, 48)
    x[1, 3] = torch.nan
    y = kernels.rms_norm(x, torch.ones(48), 1e-6)
    assert torch.isfinite(y[0]).all()
    assert torch.isnan(y[1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 1536), (4, 37), (0, 8)])
def test_act_mul(dtype: torch.dtype, activation: str, rows: int, size: int) -> None:
    x = (torch.randn(rows, 2 * size) * 3).to(dtype)
    if rows:
        x[0, :4] = torch.tensor([0.0, -30.0, 30.0, -5.0])
    gate, up = x.double().chunk(2, dim=1)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    act = (
        torch.nn.functional.silu(gate)
        if activation == "silu"
        else torch.nn.functional.gelu(gate, approximate=approximate)
    )
    close(kernels.act_mul(x, activation), act * up, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 20), (48, 48), (128, 2)])
def test_rope_turns_views_in_place(dtype: torch.dtype, interleaved: bool, dim: int, rotary_dim: int) -> None:
    fused = torch.randn(6, 5 * dim + 3).to(dtype)
    before = fused.clone()
    x = fused[:, : 5 * dim].unflatten(1, (5, dim))
    positions = torch.tensor([0, 1, 2, 99, 50, 7], dtype=torch.int32)
    angle = torch.arange(100)[:, None] * 10000 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
    kernels.rope(x, positions, cos_sin, interleaved=interleaved)
    old = before[:, : 5 * dim].unflatten(1, (5, dim)).double()
    cos, sin = cos_sin[positions.long()].double()[:, None].chunk(2, -1)
    turned = old[..., :rotary_dim]
    pair = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    a, b = pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin
    expected = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    close(x[..., :rotary_dim], expected)
    assert torch.equal(x[..., rotary_dim:].double(), old[..., rotary_dim:])
    assert torch.equal(fused[:, 5 * dim :], before[:, 5 * dim :])


@pytest.mark.parametrize("vocab", [1, 31, 32, 100, 4097])
def test_token_bitmask(vocab: int) -> None:
    logits = torch.randn(4, vocab)
    allowed = torch.rand(4, vocab) < 0.5
    allowed[1] = True
    padded = torch.zeros(4, -(-vocab // 32) * 32, dtype=torch.int64)
    padded[:, :vocab] = allowed
    words = (padded.view(4, -1, 32) << torch.arange(32)).sum(-1).to(torch.uint32).view(torch.int32)
    expected = logits.masked_fill(~allowed, -torch.inf)
    kernels.token_bitmask(logits, words)
    assert torch.equal(logits, expected)


def test_wrong_arguments_are_refused_with_the_value() -> None:
    with pytest.raises(ValueError, match=r"weight must be \[8\]"):
        kernels.rms_norm(torch.zeros(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="int64"):
        kernels.rms_norm(torch.zeros(2, 8, dtype=torch.int64), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"\[t, 2 \* size\]"):
        kernels.act_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="rotary_dim 16 does not fit 8"):
        kernels.rope(torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.int32), torch.zeros(4, 16))
    with pytest.raises(ValueError, match="does not cover"):
        kernels.token_bitmask(torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int32))

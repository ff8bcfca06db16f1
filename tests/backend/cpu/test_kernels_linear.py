"""linear, pack, dequantize and embed of every weight scheme against float64 and the gguf package."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from kernel_bounds import UNIT, reduction_bound, worst
from torch import Tensor

from core_cpu import _kernels, kernels
from core_cpu.kernels import Scheme

GGUF = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
    "q5_1": gguf.GGMLQuantizationType.Q5_1,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
    "q5_k": gguf.GGMLQuantizationType.Q5_K,
    "q6_k": gguf.GGMLQuantizationType.Q6_K,
}
ROWS = (1, 2, 3, 4, 5, 12, 13, 33)


def random_blocks(name: str, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random GGUF bytes [n, row bytes] with sane scales, and what the gguf package makes of them, float64."""
    kind = GGUF[name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n * k // elements, num_bytes), dtype=np.uint8)
    scales = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "q4_1": (0, 2), "q5_1": (0, 2)}.get(name, (0,))
    for at in scales:
        values = (rng.standard_normal(len(blocks)) * 0.02).astype(np.float16)
        blocks[:, at : at + 2] = values[:, None].view(np.uint8)
    rows = blocks.reshape(n, -1)
    dense = gguf.quants.dequantize(rows, kind)
    return torch.from_numpy(rows), torch.from_numpy(np.ascontiguousarray(dense)).double()


def check_linear(
    packed: kernels.PackedWeight,
    weight: Tensor,
    x: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype = torch.float32,
    invariant: bool = False,
) -> None:
    got = kernels.linear(x, packed, bias, out_dtype=out_dtype, invariant=invariant)
    ref = x.double() @ weight.T
    magnitude = x.double().abs() @ weight.abs().T
    if bias is not None:
        ref, magnitude = ref + bias.double(), magnitude + bias.double().abs()
    assert got.dtype == out_dtype
    assert worst(got, ref, reduction_bound(ref, magnitude, x.shape[1], out_dtype)) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(16, 16), (1, 1), (37, 61), (96, 515), (130, 1030)])
def test_dense_weights_of_any_shape(dtype: torch.dtype, n: int, k: int) -> None:
    torch.manual_seed(n + k)
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
    packed = kernels.pack(weight)
    assert torch.equal(kernels.dequantize(packed), weight.float())
    for m in ROWS:
        check_linear(packed, weight.double(), torch.randn(m, k).to(dtype), bias)
    check_linear(packed, weight.double(), torch.randn(300, k).to(dtype), None, out_dtype=dtype)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activation_and_result_types_mix(x_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    weight = torch.randn(40, 70).bfloat16()
    for bias in (None, torch.randn(40).bfloat16()):
        x = torch.randn(5, 70).to(x_dtype)
        check_linear(kernels.pack(weight), weight.double(), x, bias, out_dtype=out_dtype)


def test_a_dense_weight_can_be_kept_in_another_type() -> None:
    weight = torch.randn(33, 50)
    for scheme, dtype in ((Scheme.BF16, torch.bfloat16), (Scheme.F16, torch.float16), (Scheme.F32, torch.float32)):
        assert torch.equal(kernels.dequantize(kernels.pack(weight, scheme)), weight.to(dtype).float())


def test_rows_of_x_and_y_may_lie_apart_and_none_may_come() -> None:
    weight = torch.randn(24, 40)
    packed = kernels.pack(weight)
    x = torch.randn(7, 100)[:, 30:70]
    out = torch.full((7, 64), 9.0)
    kernels.linear(x, packed, out=out[:, 8:32])
    assert torch.allclose(out[:, 8:32], x @ weight.T, atol=1e-4)
    assert (out[:, :8] == 9).all()
    assert (out[:, 32:] == 9).all()
    assert kernels.linear(torch.empty(0, 40), packed).shape == (0, 24)


@pytest.mark.parametrize("name", sorted(GGUF))
def test_gguf_weights_stay_quantized_and_dequantize_as_the_gguf_package_does(name: str) -> None:
    n, k = 50, 768
    rows, weight = random_blocks(name, n, k)
    packed = kernels.pack(rows, Scheme[name.upper()])
    assert packed.nbytes <= rows.numel() * 1.06 * 64 / 50
    dense = kernels.dequantize(packed).double()
    assert worst(dense, weight, 2 * UNIT[torch.float32] * (weight.abs() + weight.abs().amax())) <= 1
    for m in ROWS:
        x = torch.randn(m, k)
        check_linear(packed, weight, x, None)
        check_linear(packed, weight, x.bfloat16(), torch.randn(n), out_dtype=torch.bfloat16)
        check_linear(packed, weight, x, None, invariant=True)


@pytest.mark.parametrize("name", sorted(GGUF))
def test_gguf_products_with_int8_activations_are_those_of_the_rounded_rows(name: str) -> None:
    elements = gguf.GGML_QUANT_SIZES[GGUF[name]][0]
    for n, k in ((50, 768), (37, elements), (37, 9 * elements)):
        rows, weight = random_blocks(name, n, k)
        packed = kernels.pack(rows, Scheme[name.upper()])
        x = torch.randn(130, k)
        blocks = x.unflatten(1, (-1, 32))
        top = blocks.abs().amax(-1, keepdim=True)
        inverse = torch.full_like(top, 127) / top  # 127 / top would be a reciprocal times 127, rounded twice
        rounded = ((blocks * inverse).round() * (top / 127)).flatten(1)
        first = kernels.linear(x[:1], packed, int8_activations=True)
        for m in (*ROWS, 130):
            got = kernels.linear(x[:m], packed, int8_activations=True)
            ref = rounded[:m].double() @ weight.T
            magnitude = rounded[:m].double().abs() @ weight.abs().T
            assert worst(got, ref, reduction_bound(ref, magnitude, k, torch.float32)) <= 1
            assert torch.equal(got[:1], first)


def test_rows_that_cannot_be_rounded_give_nan_and_rows_of_zeros_zero() -> None:
    packed = kernels.pack(random_blocks("q8_0", 20, 64)[0], Scheme.Q8_0)
    x = torch.zeros(3, 64)
    x[1, 40] = torch.inf
    y = kernels.linear(x, packed, int8_activations=True)
    assert torch.isnan(y[1]).all()
    assert (y[[0, 2]] == 0).all()


def fp8(n: int, k: int) -> Tensor:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    return every[torch.randint(len(every), (n, k))].view(torch.float8_e4m3fn)


@pytest.mark.parametrize("kind", ["tensor", "channel", "block", "block_ue8m0", "block_bf16"])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (37, 61), (150, 300), (260, 384)])
def test_fp8_weights_with_every_kind_of_scale(kind: str, n: int, k: int) -> None:
    weight = fp8(n, k)
    blocks = (-(-n // 128), -(-k // 128))
    scale = {"tensor": torch.rand(1, 1), "channel": torch.rand(n, 1)}.get(kind, torch.rand(blocks)) + 0.5
    if kind == "block_ue8m0":
        scale = torch.randint(120, 130, blocks, dtype=torch.uint8)
    if kind == "block_bf16":
        scale = scale.bfloat16()
    packed = kernels.pack(weight, scale=scale)
    values = scale.view(torch.float8_e8m0fnu).double() if kind == "block_ue8m0" else scale.double()
    if kind.startswith("block"):
        values = values.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    dense = weight.float().double() * values
    assert torch.allclose(kernels.dequantize(packed).double(), dense, rtol=1e-6)
    for m in ROWS:
        check_linear(packed, dense, torch.randn(m, k).bfloat16(), None)
        check_linear(packed, dense, torch.randn(m, k), torch.randn(n))


def test_a_nan_in_an_fp8_row_reaches_that_output_alone() -> None:
    weight = fp8(40, 64).clone()
    weight.view(torch.uint8)[17, 5] = 0x7F
    y = kernels.linear(torch.randn(3, 64), kernels.pack(weight, scale=torch.ones(1)))
    assert torch.isnan(y[:, 17]).all()
    assert torch.isfinite(torch.cat((y[:, :17], y[:, 18:]), 1)).all()


@pytest.mark.parametrize(("n", "k"), [(16, 64), (37, 61), (100, 530)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_exact_in_int32_with_rows_quantized_half_to_even(n: int, k: int, dtype: torch.dtype) -> None:
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale = torch.rand(n, 1) * 0.01
    packed = kernels.pack(weight, scale=scale)
    assert torch.equal(kernels.dequantize(packed), weight.float() * scale)
    for m in ROWS:
        x = torch.randn(m, k).to(dtype)
        x[0] *= 0 if m > 1 else 1
        row_scale = x.float().abs().amax(1, keepdim=True) / 127
        q = (x.float() / row_scale.clamp(min=1e-38)).round().clamp(-127, 127)
        ref = (q.double() @ weight.double().T).float() * row_scale * scale.T
        assert torch.equal(kernels.linear(x, packed, out_dtype=torch.float32), ref)


@pytest.mark.parametrize("scheme", ["f32", "bf16", "fp8", "int8", "q4_k", "q8_0"])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(scheme: str) -> None:
    k = 512
    if scheme.startswith("q"):
        packed = kernels.pack(random_blocks(scheme, 70, k)[0], Scheme[scheme.upper()])
    elif scheme == "int8":
        packed = kernels.pack(torch.randint(-127, 128, (70, k), dtype=torch.int8), scale=torch.rand(70))
    elif scheme == "fp8":
        packed = kernels.pack(fp8(70, k), scale=torch.rand(1, 4))
    else:
        packed = kernels.pack(torch.randn(70, k).to(torch.float32 if scheme == "f32" else torch.bfloat16))
    x = torch.randn(300, k).bfloat16()
    whole = kernels.linear(x, packed, out_dtype=torch.float32, invariant=True)
    for m in (1, 2, 3, 5, 8, 17, 100, 250):
        assert torch.equal(kernels.linear(x[:m], packed, out_dtype=torch.float32, invariant=True), whole[:m])


@pytest.mark.parametrize("scheme", [*Scheme])
def test_packing_leaves_nothing_of_what_was_in_memory_before(scheme: Scheme) -> None:
    n, k = 21, 256 if scheme >= Scheme.Q8_0 else 67
    row_bytes = 4 * k + 12
    source = torch.randint(0, 100, (n, row_bytes), dtype=torch.uint8)
    panels = []
    for before in (0, 0xAA):
        out = torch.full((_kernels.packed_bytes(int(scheme), n, k),), before, dtype=torch.uint8)
        _kernels.pack(int(scheme), n, k, source.data_ptr(), row_bytes, 0, out.data_ptr())
        panels.append(out)
    assert torch.equal(*panels)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    weight, x = torch.randn(600, 700).bfloat16(), torch.randn(40, 700).bfloat16()
    packed = kernels.pack(weight)
    expected = kernels.linear(x, packed)
    before = kernels.num_threads()
    kernels.set_num_threads(threads)
    try:
        assert kernels.num_threads() == threads
        assert torch.equal(kernels.linear(x, packed), expected)
    finally:
        kernels.set_num_threads(before)


@pytest.mark.parametrize("name", ["bf16", "f32", "fp8_block", *sorted(GGUF)])
def test_embed_reads_rows_out_of_the_packed_weight(name: str) -> None:
    n, k = 70, 512
    if name in GGUF:
        packed = kernels.pack(random_blocks(name, n, k)[0], Scheme[name.upper()])
    elif name == "fp8_block":
        packed = kernels.pack(fp8(n, k), scale=torch.rand(1, 4))
    else:
        packed = kernels.pack(torch.randn(n, k).to(torch.bfloat16 if name == "bf16" else torch.float32))
    ids = torch.randint(n, (19,), dtype=torch.int32)
    for scale, dtype in ((1.0, torch.float32), (3.5, torch.bfloat16)):
        expected = (kernels.dequantize(packed)[ids.long()] * scale).to(dtype)
        assert torch.equal(kernels.embed(ids, packed, out_dtype=dtype, scale=scale), expected)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: kernels.pack(torch.zeros(4, 33, dtype=torch.uint8), Scheme.Q4_0), "blocks of 18 bytes"),
        (lambda: kernels.pack(torch.zeros(4, 4, dtype=torch.int64)), "name the scheme"),
        (lambda: kernels.pack(torch.zeros(4, 4, dtype=torch.int8)), "needs a scale"),
        (lambda: kernels.pack(torch.zeros(4, 4, dtype=torch.int8), scale=torch.ones(3)), "must have 1 element, 4"),
        (lambda: kernels.linear(torch.zeros(2, 5), kernels.pack(torch.zeros(4, 4))), r"x must be \[m, 4\]"),
        (lambda: kernels.linear(torch.zeros(2, 4).double(), kernels.pack(torch.zeros(4, 4))), "float64"),
        (lambda: kernels.linear(torch.zeros(4, 2).T, kernels.pack(torch.zeros(4, 4))), "rows"),
        (lambda: kernels.pack(torch.zeros(0, 4)), "must not be empty"),
        (lambda: kernels.set_num_threads(-1), "at least 0"),
    ],
)
def test_wrong_arguments_are_refused_with_the_value(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()

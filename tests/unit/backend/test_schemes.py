"""Weight schemes: dequantization against the gguf package, quantization within its own step, registration."""

from __future__ import annotations

import math
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from core.backend import SCHEMES, Packed, Scheme, WeightSource
from core.backend import schemes as weight_schemes
from core.backend.schemes import GGUF_BLOCKS, dense_rows

GGUF = sorted(GGUF_BLOCKS)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_bytes_mean_what_the_gguf_package_says(name: str) -> None:
    elements, num_bytes, _ = GGUF_BLOCKS[name]
    data = np.random.default_rng(3).integers(0, 256, (300, 3 * num_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()])
    got = SCHEMES[name].dequantize({"weight": torch.from_numpy(data)})
    assert got.dtype == torch.float32 and got.shape == (300, 3 * elements)
    assert np.array_equal(got.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_gguf_of_real_weights(name: str) -> None:
    values = np.random.default_rng(4).standard_normal((40, 128)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    got = SCHEMES[name].dequantize({"weight": torch.from_numpy(data)}).numpy()
    assert np.array_equal(got, gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()]))
    assert np.abs(got - values).max() < {"8": 0.03, "5": 0.35, "4": 0.7}[name[1]]


def test_gguf_experts_lead_with_their_dim() -> None:
    _, num_bytes, _ = GGUF_BLOCKS["q4_k"]
    data = torch.randint(0, 60, (3, 5, 2 * num_bytes), dtype=torch.uint8)
    whole = SCHEMES["q4_k"].dequantize({"weight": data})
    assert whole.shape == (3, 5, 512)
    assert torch.equal(whole[1], SCHEMES["q4_k"].dequantize({"weight": data[1]}))


def test_gguf_slices_join(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 60, (9, 34), dtype=torch.uint8)
    whole = SCHEMES["q8_0"].dequantize({"weight": data})
    monkeypatch.setattr(weight_schemes, "_CHUNK_ELEMENTS", 64)
    assert torch.equal(SCHEMES["q8_0"].dequantize({"weight": data}), whole)


# -- scaled schemes --------------------------------------------------------------------------------------------------

QUANTIZERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int8": weight_schemes.quantize_int8,
    "fp8_tensor": weight_schemes.quantize_fp8_tensor,
    "fp8_channel": weight_schemes.quantize_fp8_channel,
    "fp8_block": weight_schemes.quantize_fp8_block,
}
SCALE_SHAPES = {"int8": (300, 1), "fp8_tensor": (1, 1), "fp8_channel": (300, 1), "fp8_block": (3, 2)}


def columns_of(scale: Tensor, name: str, shape: tuple[int, int]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """The scale of every element, by index arithmetic."""
    block = 128 if name == "fp8_block" else 1
    rows, columns = np.indices(shape)
    at_row = rows // block if scale.shape[0] > 1 else 0 * rows
    at_column = columns // block if scale.shape[1] > 1 else 0 * columns
    return scale.double().numpy()[at_row, at_column]


@pytest.mark.parametrize("leading", [(), (3,)])
@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_quantizing_keeps_within_a_step_and_hits_the_largest(name: str, leading: tuple[int, ...]) -> None:
    weight = torch.randn(*leading, 300, 200) * torch.rand(*leading, 300, 1)
    q, scale = QUANTIZERS[name](weight)
    assert q.dtype == (torch.int8 if name == "int8" else torch.float8_e4m3fn) and q.shape == weight.shape
    assert scale.dtype == torch.float32 and scale.shape == (*leading, *SCALE_SHAPES[name])
    back = SCHEMES[name].dequantize({"weight": q, "scale": scale})
    assert back.dtype == torch.float32 and back.shape == weight.shape
    last = (weight.reshape(-1, 300, 200)[-1], q.reshape(-1, 300, 200)[-1], back.reshape(-1, 300, 200)[-1])
    wide = columns_of(scale.reshape(-1, *SCALE_SHAPES[name])[-1], name, (300, 200))
    assert np.array_equal(last[2].numpy(), (last[1].double().numpy() * wide).astype(np.float32))
    step = 0.5 if name == "int8" else 2.0**-4 * last[0].abs().double().numpy() / wide + 2.0**-10
    assert (np.abs(last[2].double().numpy() - last[0].double().numpy()) <= (step + 1e-4) * wide).all()
    assert last[1].float().abs().max() == (127 if name == "int8" else 448)


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_zeros_stay_zeros(name: str) -> None:
    q, scale = QUANTIZERS[name](torch.zeros(130, 4))
    assert (SCHEMES[name].dequantize({"weight": q, "scale": scale}) == 0).all()


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e8m0fnu])
def test_block_scales_as_powers_of_two(kind: torch.dtype) -> None:
    q, _ = weight_schemes.quantize_fp8_block(torch.randn(130, 260))
    exponents = torch.tensor([[120, 127, 130], [126, 128, 125]], dtype=torch.uint8)
    scale = exponents if kind is torch.uint8 else exponents.view(torch.float8_e8m0fnu)
    powers = torch.pow(2.0, exponents.float() - 127)
    dequantize = SCHEMES["fp8_block"].dequantize
    expected = dequantize({"weight": q, "scale": powers})
    assert torch.equal(dequantize({"weight": q, "scale": scale}), expected)
    packed = Packed(shape=(130, 260), scheme="fp8_block", tensors={"weight": q, "scale": scale})
    rows = torch.tensor([129, 0, 128])
    assert torch.equal(dense_rows(packed, rows), expected[rows])


def test_half_scales_and_scalars_broadcast() -> None:
    q, _ = weight_schemes.quantize_fp8_tensor(torch.randn(5, 4))
    for scale in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]], dtype=torch.bfloat16)):
        packed = Packed(shape=(5, 4), scheme="fp8_tensor", tensors={"weight": q, "scale": scale})
        assert torch.equal(packed.dense(), q.float() * 0.5)
        assert torch.equal(dense_rows(packed, torch.tensor([3])), q[3:4].float() * 0.5)


def test_dequantizing_leaves_the_parts_alone() -> None:
    weight = torch.randn(5, 4)
    scale = torch.full((5, 1), 2.0)
    before = weight.clone()
    SCHEMES["int8"].dequantize({"weight": weight, "scale": scale})
    SCHEMES["fp8_block"].dequantize({"weight": weight, "scale": torch.ones(1, 1)})
    assert torch.equal(weight, before)


@pytest.mark.parametrize("group", weight_schemes.INT4_GROUPS)
def test_int4_groups_keep_within_a_step_of_their_own(group: int) -> None:
    weight = torch.randn(2, 7, 256) * 10.0 ** torch.randint(-3, 3, (2, 7, 1)) + torch.rand(2, 7, 1)
    packed, scale, zero = weight_schemes.quantize_int4_group(weight, group)
    assert packed.shape == (2, 7, 128) and scale.shape == zero.shape == (2, 7, 256 // group)
    parts = {"weight": packed, "scale": scale, "zero": zero}
    back = SCHEMES["int4_group"].dequantize(parts)
    assert back.dtype == torch.float32 and back.shape == weight.shape
    wide = scale.repeat_interleave(group, dim=-1)
    assert ((back - weight).abs() <= 1.001 * wide).all()
    low = (packed[0, 3, 5] & 15).float() - zero[0, 3, 10 // group].float()
    assert back[0, 3, 10] == low * scale[0, 3, 10 // group]
    rows = torch.tensor([6, 0])
    one = Packed(shape=(7, 256), scheme="int4_group", tensors={name: part[1] for name, part in parts.items()})
    assert torch.equal(dense_rows(one, rows), back[1][rows])


def test_int4_groups_of_zeros_stay_zeros() -> None:
    packed, scale, zero = weight_schemes.quantize_int4_group(torch.zeros(3, 64), 32)
    assert (SCHEMES["int4_group"].dequantize({"weight": packed, "scale": scale, "zero": zero}) == 0).all()
    with pytest.raises(AssertionError, match="48 columns in groups of 32"):
        weight_schemes.quantize_int4_group(torch.zeros(3, 48), 32)


# -- registration ----------------------------------------------------------------------------------------------------


def test_every_scheme_is_registered_once_under_its_name() -> None:
    assert set(SCHEMES) == {"none", "int4_group", *QUANTIZERS, *GGUF}
    assert all(scheme.name == name and scheme.parts[0] == "weight" for name, scheme in SCHEMES.items())


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("none", 1, 1),
        ("int8", 1, 1),
        ("fp8_block", 128, 128),
        ("int4_group", 1, 128),
        ("q4_1", 1, 32),
        ("q6_k", 1, 256),
    ],
)
def test_cuts_follow_the_blocks(name: str, rows: int, columns: int) -> None:
    assert (SCHEMES[name].granularity(0), SCHEMES[name].granularity(1)) == (rows, columns)


@pytest.mark.parametrize("name", GGUF)
def test_bits_are_those_of_the_block(name: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert SCHEMES[name].bits == size * 8 / block and SCHEMES[name].block == block


class _Stored(WeightSource):
    name, shape, scheme = "w", (5, 4), "int8"

    def parts(self) -> dict[str, Tensor]:
        return {"weight": torch.full((5, 4), 3, dtype=torch.int8), "scale": torch.arange(5.0)[:, None]}


def test_a_source_gives_dense_values_in_the_type_asked_for() -> None:
    dense = _Stored().dense(torch.bfloat16)
    assert dense.dtype == torch.bfloat16 and torch.equal(dense[:, 0].float(), 3 * torch.arange(5.0))


def test_activation_formats() -> None:
    x = torch.randn(4, 300)
    for form, scales in (("int8_row", 1), ("fp8_row", 1), ("fp8_block128", math.ceil(300 / 128))):
        act = weight_schemes.quantize_rows(x, form)
        assert act.format == form and act.scale.shape == (4, scales) and act.q.shape == x.shape
    with pytest.raises(AssertionError, match="no activation format"):
        weight_schemes.quantize_rows(x, "int3")


def test_a_scheme_is_data() -> None:
    assert isinstance(SCHEMES["none"], Scheme)
    weight = torch.randn(2, 3).bfloat16()
    assert torch.equal(SCHEMES["none"].dequantize({"weight": weight}), weight.float())

"""Quantized safetensors checkpoints: each supported method against its arithmetic, and the others refused."""

from __future__ import annotations

import pytest
import torch

from core.errors import ModelLoadError
from core.loader import open_checkpoint

FP8 = torch.float8_e4m3fn
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def compressed(kind: str, strategy: str, **weights: object) -> dict:
    settings = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": settings}}}


def stored(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)


@pytest.mark.parametrize(
    ("settings", "dtype", "suffix", "scale", "scheme"),
    [
        (BLOCK, FP8, "weight_scale_inv", torch.rand(2, 3), "fp8_block"),
        (compressed("float", "block", block_structure=[128, 128]), FP8, "weight_scale", torch.rand(2, 3), "fp8_block"),
        (compressed("float", "channel"), FP8, "weight_scale", torch.rand(200, 1), "fp8_channel"),
        (compressed("float", "channel"), FP8, "weight_scale", torch.rand(200), "fp8_channel"),
        (compressed("float", "tensor"), FP8, "weight_scale", torch.rand(1), "fp8_channel"),
        ({"quant_method": "fp8"}, FP8, "weight_scale", torch.rand(()), "fp8_channel"),
        (compressed("int", "channel"), torch.int8, "weight_scale", torch.rand(200, 1), "int8"),
        (compressed("int", "tensor"), torch.int8, "weight_scale", torch.rand(1), "int8"),
    ],
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_quantized_weight_means_values_times_scales(folder_of, settings, dtype, suffix, scale, scheme, scale_dtype):
    values, scale = stored(200, 300, dtype), scale.to(scale_dtype)
    tensors = {"a.weight": values, f"a.{suffix}": scale, "a.input_scale": torch.ones(1), "a.bias": torch.ones(200)}
    with open_checkpoint(folder_of([tensors], {"quantization_config": settings})) as checkpoint:
        assert sorted(checkpoint.names()) == ["a.bias", "a.weight"]
        info, weight = checkpoint.info("a.weight"), checkpoint.load_quantized("a.weight")
        assert (info.scheme, weight.scheme, weight.shape) == (scheme, scheme, (200, 300))
        assert info.nbytes == 200 * 300 + scale.numel() * scale.element_size()
        wide = scale.float()
        if scheme == "fp8_block":
            wide = wide.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
        wanted = values.float() * wide.reshape(-1, wide.shape[-1] if wide.dim() == 2 else 1)
        assert torch.equal(weight.dequantize(), wanted)
        assert torch.equal(checkpoint.load("a.weight"), wanted)
        assert checkpoint.load_quantized("a.bias") is None


def test_block_weights_are_cut_at_blocks_alone(folder_of):
    tensors = {"a.weight": stored(256, 384, FP8), "a.weight_scale_inv": torch.rand(2, 3)}
    with open_checkpoint(folder_of([tensors], {"quantization_config": BLOCK})) as checkpoint:
        weight = checkpoint.load_quantized("a.weight")
    dense = weight.dequantize()
    assert torch.equal(weight.narrow(0, 128, 128).narrow(1, 128, 256).dequantize(), dense[128:, 128:])
    with pytest.raises(ModelLoadError, match=r"\[64, 128\) out of axis 0 of shape \(256, 384\).*fp8_block.*128"):
        weight.narrow(0, 64, 64)
    with pytest.raises(ModelLoadError, match="128 rows of fp8_block share scales"):
        weight.take_rows(torch.tensor([1]))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, r"'awq' \(bits 4\)"),
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        (compressed("int", "group", num_bits=4), "'compressed-tensors'"),
        (compressed("int", "channel", symmetric=False), "'compressed-tensors'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"\(format pack-quantized\)"),
        ({"bits": 8}, "None"),
    ],
)
def test_other_methods_are_refused_by_name_with_what_is_supported(folder_of, settings, named):
    with pytest.raises(ModelLoadError, match=rf"is quantized with .*{named}.*supported are fp8 .*compressed-tensors"):
        open_checkpoint(folder_of([{"a": torch.ones(1)}], {"quantization_config": settings}))


def test_quantized_weight_without_its_scale_is_refused(folder_of):
    with pytest.raises(ModelLoadError, match=r"a\.weight has no a\.weight_scale_inv"):
        open_checkpoint(folder_of([{"a.weight": stored(4, 4, FP8)}], {"quantization_config": BLOCK}))


def test_scale_of_a_wrong_shape_is_refused(folder_of):
    tensors = {"a.weight": stored(256, 4, FP8), "a.weight_scale_inv": torch.rand(1, 1)}
    with pytest.raises(ModelLoadError, match=r"shape \(1, 1\), fp8_block needs \(2, 1\)"):
        open_checkpoint(folder_of([tensors], {"quantization_config": BLOCK}))

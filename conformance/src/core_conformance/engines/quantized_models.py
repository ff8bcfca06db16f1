"""Tiny models with quantized weights, and what transformers says of them in plain arithmetic."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from torch import Tensor

from core_conformance.engines.models import NUM_TOKENS, hf_model, model_folder

__all__ = ["QUANTIZED", "QuantizedModel", "gguf_file", "quantized_logits"]


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """A way to quantized weights.

    Args:
        model: Which of the suite's models they are of.
        form: Type of a GGUF file, or a word of `--quantization`.
        activations: What the plain arithmetic rounds the inputs of each product to, a row at a time.
    """

    model: str
    form: str
    activations: Literal["int8", "fp8"] | None = None

    @property
    def is_file(self) -> bool:
        """Whether the weights are stored quantized, in a GGUF file; else they are quantized when they are loaded."""
        return self.activations is None


QUANTIZED = {
    "gguf-q8_0": QuantizedModel(model="qwen2", form="Q8_0"),
    "gguf-q4_1": QuantizedModel(model="qwen2", form="Q4_1"),
    "int8": QuantizedModel(model="llama", form="int8", activations="int8"),
    "fp8": QuantizedModel(model="llama", form="fp8", activations="fp8"),
}
"""Rows of Qwen2 stand in a GGUF file as Hugging Face has them: nothing is permuted on the way."""

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@functools.cache
def gguf_file(name: str) -> Path:
    """A key of `QUANTIZED` as a file: matrices in its type, vectors in float32."""
    spec = QUANTIZED[name]
    net = hf_model(spec.model, torch.float32)
    path = model_folder(spec.model).with_suffix(f".{spec.form}.gguf")
    writer = gguf.GGUFWriter(path, spec.model)
    _write_metadata(writer, net.config)
    for hf_name, tensor in net.state_dict().items():
        module, kind = hf_name.rsplit(".", 1)
        quant = _type(spec, tensor)
        writer.add_tensor(f"{_gguf_name(module)}.{kind}", _quantize(tensor, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.inference_mode()
def quantized_logits(name: str, tokens: tuple[int, ...], dtype: torch.dtype, *, rounded: bool) -> Tensor:
    """Logits of transformers over the dequantized weights, [len(tokens), vocabulary], float64.

    Args:
        rounded: Whether the inputs of each product are rounded to 8 bits too; else only `dtype` rounds.
    """
    net = _dequantized(name, dtype)
    form = QUANTIZED[name].activations if rounded else None
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: (_rounded(inputs[0], form),))
        for path, module in net.named_modules()
        if form is not None and isinstance(module, torch.nn.Linear) and path != "lm_head"
    ]
    try:
        logits: Tensor = net(torch.tensor([tokens])).logits[0, :, :NUM_TOKENS]
    finally:
        for hook in hooks:
            hook.remove()
    return logits.double()


@functools.cache
def _dequantized(name: str, dtype: torch.dtype) -> Any:
    spec = QUANTIZED[name]
    with torch.inference_mode(False), torch.no_grad():
        net: Any = copy.deepcopy(hf_model(spec.model, torch.float32))
        for path, parameter in net.named_parameters():
            if parameter.dim() != 2:
                continue
            if spec.is_file:
                quant = _type(spec, parameter)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(_quantize(parameter, quant), quant)))
            elif "_proj" in path:
                parameter.copy_(_rounded(parameter, spec.activations))
        return net.to(dtype).eval()


def _rounded(x: Tensor, form: str | None) -> Tensor:
    """Each row rounded to 8 bits with a scale of its own."""
    wide = x.float()
    if form == "int8":
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127.0
        return ((wide / scale).round().clamp(-127, 127) * scale).to(x.dtype)
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _type(spec: QuantizedModel, tensor: Tensor) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[spec.form if tensor.dim() == 2 else "F32"]


def _quantize(tensor: Tensor, quant: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    quantized: np.ndarray[Any, Any] = gguf.quants.quantize(tensor.detach().float().numpy(), quant)
    return quantized


def _gguf_name(module: str) -> str:
    if module in _TOP:
        return _TOP[module]
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}"


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])

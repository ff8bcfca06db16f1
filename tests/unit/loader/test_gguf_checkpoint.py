"""GGUF models in Hugging Face terms: names, row order, norms, configuration, rotary settings."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.errors import ModelLoadError
from core.loader import open_checkpoint

GEMMA = {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 8, "block_count": 12}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def as_converter_permutes(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What a converter does to q and k of Llama models: the halves of a head become neighbours."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_rows_of_llama_queries_and_keys_come_back_in_hugging_face_order(gguf_of, kind):
    query, key, value = random(32, 32), random(16, 32), random(16, 32)
    tensors = {
        "blk.0.attn_q.weight": (as_converter_permutes(query, 4), kind),
        "blk.0.attn_k.weight": (as_converter_permutes(key, 2), kind),
        "blk.0.attn_v.weight": (value, kind),
        "blk.0.attn_q.bias": (as_converter_permutes(query[:, 0], 4), "F32"),
    }
    with open_checkpoint(gguf_of(tensors=tensors)) as checkpoint:
        for name, wanted in (("q", query), ("k", key), ("v", value)):
            stored = f"model.layers.0.self_attn.{name}_proj.weight"
            # Q8_0 rounds to half a step of at most 4 / 127.
            tolerance = 0.0 if kind == "F32" else 0.02
            assert np.abs(checkpoint.load(stored).numpy() - wanted).max() <= tolerance
            if kind == "Q8_0":
                assert torch.equal(checkpoint.load_quantized(stored).dequantize(), checkpoint.load(stored))
        assert np.array_equal(checkpoint.load("model.layers.0.self_attn.q_proj.bias").numpy(), query[:, 0])
        assert checkpoint.config["attention_bias"] is True


def test_rows_of_other_architectures_stay(gguf_of):
    query = random(32, 32)
    path = gguf_of("qwen2", tensors={"blk.0.attn_q.weight": (query, "F32")})
    with open_checkpoint(path) as checkpoint:
        assert np.array_equal(checkpoint.load("model.layers.0.self_attn.q_proj.weight").numpy(), query)


def test_head_count_that_does_not_fit_the_matrix_is_refused(gguf_of):
    path = gguf_of(tensors={"blk.0.attn_k.weight": (random(32, 32), "F32")})
    with pytest.raises(ModelLoadError, match=r"k_proj\.weight has 32 rows and the metadata asks for 16"):
        open_checkpoint(path)


def test_norms_of_gemma_lose_the_one_that_the_file_adds(gguf_of):
    stems = {
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.post_attention_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.ffn_norm": "model.layers.0.pre_feedforward_layernorm",
        "blk.0.post_ffw_norm": "model.layers.0.post_feedforward_layernorm",
        "blk.0.attn_q_norm": "model.layers.0.self_attn.q_norm",
        "blk.0.attn_k_norm": "model.layers.0.self_attn.k_norm",
        "output_norm": "model.norm",
    }
    weight = random(32)
    tensors = {f"{stem}.weight": (weight + 1, "F32") for stem in stems}
    with open_checkpoint(gguf_of("gemma3", GEMMA, tensors)) as checkpoint:
        for name in stems.values():
            assert np.allclose(checkpoint.load(f"{name}.weight").numpy(), weight, atol=1e-6)


def test_norms_of_llama_stay(gguf_of):
    weight = random(32)
    tensors = {"blk.0.ffn_norm.weight": (weight, "F32"), "output_norm.weight": (weight, "F32")}
    with open_checkpoint(gguf_of(tensors=tensors)) as checkpoint:
        assert np.array_equal(checkpoint.load("model.layers.0.post_attention_layernorm.weight").numpy(), weight)
        assert np.array_equal(checkpoint.load("model.norm.weight").numpy(), weight)


def test_all_other_names_of_a_layer(gguf_of):
    stems = {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    stems["ffn_down"] = "mlp.down_proj"
    tensors = {f"blk.0.{stem}.weight": (random(4, 32), "F32") for stem in stems}
    tensors |= {"output.weight": (random(8, 32), "F32"), "blk.0.surprise.weight": (random(4, 32), "F32")}
    with open_checkpoint(gguf_of("qwen3", tensors=tensors)) as checkpoint:
        wanted = {f"model.layers.0.{name}.weight" for name in stems.values()}
        wanted |= {"model.embed_tokens.weight", "lm_head.weight", "blk.0.surprise.weight"}
        assert set(checkpoint.names()) == wanted


def test_configuration_of_llama(gguf_of):
    tokenizer = {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 0, "eot_token_id": 7}
    with open_checkpoint(gguf_of(metadata={"rope.freq_base": 5e5}, tokenizer=tokenizer)) as checkpoint:
        config = checkpoint.config
        assert checkpoint.generation_config == {"eos_token_id": [2, 7]}
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_type_of_activations_is_that_of_dense_matrices(gguf_of, kind, dtype):
    norm = {"output_norm.weight": (random(32), "F32")}
    with open_checkpoint(gguf_of(tensors={"token_embd.weight": (random(8, 32), kind), **norm})) as checkpoint:
        assert checkpoint.config["dtype"] == dtype


def test_output_matrix_unties_the_head(gguf_of):
    with open_checkpoint(gguf_of(tensors={"output.weight": (random(8, 32), "F32")})) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False


def test_configuration_of_gemma3(gguf_of):
    metadata = {**GEMMA, "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    with open_checkpoint(gguf_of("gemma3", metadata)) as checkpoint:
        config = checkpoint.config
    assert (config["architectures"], config["model_type"]) == (["Gemma3ForCausalLM"], "gemma3_text")
    assert config["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 2
    assert (config["head_dim"], config["query_pre_attn_scalar"], config["sliding_window"]) == (16, 16, 8)
    rope = Gemma3RotaryEmbedding(Gemma3TextConfig(**config))
    steps = torch.arange(8) / 8
    assert torch.allclose(rope.sliding_attention_inv_freq, 1e4**-steps)
    assert torch.allclose(rope.full_attention_inv_freq, 1e6**-steps / 8)


def test_pattern_and_query_scale_that_the_file_or_the_size_gives(gguf_of):
    metadata = {**GEMMA, "block_count": 62, "attention.sliding_window_pattern": [True, False] * 31}
    with open_checkpoint(gguf_of("gemma3", metadata)) as checkpoint:
        assert checkpoint.config["layer_types"][:3] == ["sliding_attention", "full_attention", "sliding_attention"]
        assert checkpoint.config["query_pre_attn_scalar"] == 32 // 4


def inverse_frequencies(config: dict) -> torch.Tensor:
    return LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(config))).inv_freq


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rotary_scaling_from_metadata(gguf_of, metadata, scaling):
    with open_checkpoint(gguf_of(metadata=metadata)) as checkpoint:
        assert checkpoint.config["rope_scaling"] == scaling


def test_unknown_rotary_scaling_is_refused(gguf_of):
    with pytest.raises(ModelLoadError, match="'dynamo' is unknown; supported are none, linear, yarn, longrope"):
        open_checkpoint(gguf_of(metadata={"rope.scaling.type": "dynamo"}))


def test_frequency_factors_of_llama3_give_its_frequencies(gguf_of):
    base = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131072, "rope_theta": 5e5}
    wanted = inverse_frequencies({**base, "rope_scaling": LLAMA3})
    factors = (inverse_frequencies(base) / wanted).numpy().astype(np.float32)
    tensors = {"rope_freqs.weight": (factors, "F32"), "token_embd.weight": (random(8, 256), "F32")}
    metadata = {"embedding_length": 256, "context_length": 131072, "rope.freq_base": 5e5}
    with open_checkpoint(gguf_of(metadata=metadata, tensors=tensors)) as checkpoint:
        assert checkpoint.config["rope_scaling"] == LLAMA3
        assert "rope_freqs.weight" not in checkpoint.names()
        assert torch.allclose(inverse_frequencies(checkpoint.config), wanted)


def test_frequency_factors_of_no_formula_are_kept_exactly(gguf_of):
    factors = np.array([1, 2, 5, 3], np.float32)
    with open_checkpoint(gguf_of(tensors={"rope_freqs.weight": (factors, "F32")})) as checkpoint:
        plain = inverse_frequencies({**checkpoint.config, "rope_scaling": None})
        assert torch.allclose(inverse_frequencies(checkpoint.config), plain / torch.from_numpy(factors))


def test_longrope_takes_its_factor_tensors(gguf_of):
    metadata = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64}
    metadata["rope.scaling.attn_factor"] = 1.25
    tensors = {"rope_factors_long.weight": (np.array([1, 2, 3, 4], np.float32), "F32")}
    with pytest.raises(ModelLoadError, match=r"longrope scaling lacks rope_factors_short\.weight"):
        open_checkpoint(gguf_of(metadata=metadata, tensors=tensors))
    tensors["rope_factors_short.weight"] = (np.ones(4, np.float32), "F32")
    with open_checkpoint(gguf_of(metadata=metadata, tensors=tensors)) as checkpoint:
        scaling = checkpoint.config["rope_scaling"]
    assert (scaling["long_factor"], scaling["short_factor"]) == ([1, 2, 3, 4], [1, 1, 1, 1])
    assert (scaling["attention_factor"], scaling["original_max_position_embeddings"]) == (1.25, 64)


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("rwkv7", {}, "architecture 'rwkv7'; supported in GGUF are llama, qwen2, qwen3, gemma3"),
        ("llama", {"expert_count": 8}, "has 8 experts"),
        ("llama", {"block_count": 0}, r"llama\.block_count is 0"),
        ("llama", {"attention.head_count": [4, 2]}, r"attention\.head_count is \[4, 2\]"),
        ("llama", {"attention.value_length": 4}, "key and value heads differ"),
        ("gemma3", {}, r"gemma3\.attention\.sliding_window is None"),
    ],
)
def test_models_that_cannot_be_described_are_refused(gguf_of, architecture, metadata, message):
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(gguf_of(architecture, metadata))


def test_equal_head_counts_of_all_layers_are_one_number(gguf_of):
    with open_checkpoint(gguf_of(metadata={"attention.head_count_kv": [2, 2]})) as checkpoint:
        assert checkpoint.config["num_key_value_heads"] == 2


def test_split_model_is_read_as_one_and_missing_pieces_are_named(tmp_path, gguf_of):
    """H041: a piece of a quantized model that is not on disk fails the start."""
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    gguf_of().rename(tmp_path / names[0])
    for number, name in enumerate(names[1:]):
        extra = {f"blk.{number}.ffn_up.weight": (random(4, 32), "Q4_1"), "token_embd.weight": (random(1, 32), "F32")}
        gguf_of(tensors=extra).rename(tmp_path / name)
    with pytest.raises(ModelLoadError, match=r"'token_embd\.weight' is in m-00001-of-00003\.gguf and m-00002"):
        open_checkpoint(tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelLoadError, match=r"lacks m-00002-of-00003\.gguf of the split"):
        open_checkpoint(tmp_path)


def test_folder_of_one_model_opens_and_of_two_is_refused(tmp_path, gguf_of):
    path = gguf_of()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == path
    path.with_name("other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelLoadError, match=r"holds 2 GGUF models \(model\.gguf, other\.gguf\)"):
        open_checkpoint(tmp_path)


def test_file_without_an_embedding_is_refused(gguf_of):
    path = gguf_of()
    path.write_bytes(path.read_bytes().replace(b"token_embd.weight", b"token_emb_.weight"))
    with pytest.raises(ModelLoadError, match=r"no tensor token_embd\.weight"):
        open_checkpoint(path)

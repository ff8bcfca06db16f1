"""Finding the model of a configuration, and configurations that cannot be used."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import Rig, load_model, read_config
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, NUM_TOKENIZER_IDS, VOCAB_ROWS, make_tiny

from core.errors import ModelLoadError
from core.models import BUILT_IN, describe, find_model
from core.models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from core.models.llama import LlamaForCausalLM
from core.models.qwen2 import Qwen2ForCausalLM
from core.spec import CacheKind, DType, ModelEntry

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 264,
}


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.architecture)
def test_every_built_in_entry_leads_to_its_class(entry: ModelEntry) -> None:
    model: Any = find_model({"architectures": [entry.architecture]})
    assert entry.architecture in model.architectures


def test_an_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(ModelLoadError, match=r"'MambaForCausalLM'.*Gemma3ForCausalLM, .*LlamaForCausalLM"):
        find_model({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ModelLoadError, match="architecture none"):
        find_model({})


def test_a_package_brings_and_overrides_models(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("brought")
    module.Mine = type("Mine", (LlamaForCausalLM,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "brought", module)
    extra = [ModelEntry(architecture=name, load="brought:Mine") for name in ("New", "LlamaForCausalLM")]
    for name in ("New", "LlamaForCausalLM"):
        assert find_model({"architectures": [name]}, extra) is module.Mine  # type: ignore[attr-defined]


@pytest.mark.parametrize("load", ["no_such_module:Model", "core.models.llama:Missing"])
def test_a_broken_package_is_named(load: str) -> None:
    with pytest.raises(ModelLoadError, match=f"New is announced as '{load}'"):
        find_model({"architectures": ["New"]}, [ModelEntry(architecture="New", load=load)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive whole number, got None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a positive whole number, got 'two'"),
        ({"hidden_size": 65}, "hidden_size 65 is no multiple of 4 heads"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not computed"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rope_scaling": {"type": "mrope"}}, "rope type 'mrope'"),
    ],
)
def test_an_unusable_configuration_names_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        describe({**LLAMA, **change}, DType.FLOAT32)


def test_layer_types_must_fit() -> None:
    config = {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "linear"]}
    with pytest.raises(ModelLoadError, match="2 entries for 2 layers and names linear"):
        Qwen2ForCausalLM.read_config(config)
    with pytest.raises(ModelLoadError, match="1 entries for 2 layers"):
        Qwen2ForCausalLM.read_config({**config, "layer_types": ["full_attention"]})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_describe_agrees_with_the_loaded_model(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny(architecture, tmp_path)
    model = load_model(folder)
    assert describe(read_config(folder), DType.FLOAT32) == model.spec
    assert model.spec.num_parameters == sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert len(model.cache_ops) == len(model.spec.layers)


def test_layers_of_a_hybrid_model_have_their_own_windows(tmp_path: Path) -> None:
    spec = describe(read_config(make_tiny("Gemma3ForCausalLM", tmp_path)), DType.BFLOAT16, kv_dtype=DType.FLOAT8_E4M3FN)
    windows = [(layer.kind, layer.window, layer.dtype) for layer in spec.layers if layer is not None]
    sliding = (CacheKind.SLIDING, 6, DType.FLOAT8_E4M3FN)
    assert windows == [sliding, sliding, (CacheKind.FULL, 0, DType.FLOAT8_E4M3FN)]


def test_rows_without_a_token_are_no_vocabulary(tmp_path: Path) -> None:
    """Case H045, the model's part: the head has rows that the tokenizer does not know."""
    folder = make_tiny("LlamaForCausalLM", tmp_path)
    model = load_model(folder, num_tokenizer_ids=NUM_TOKENIZER_IDS)
    assert model.spec.vocab_size == NUM_TOKENIZER_IDS < VOCAB_ROWS
    assert model.logits(torch.zeros(2, 64)).shape == (2, VOCAB_ROWS)
    config = read_config(folder)
    assert describe(config, DType.FLOAT32).vocab_size == VOCAB_ROWS
    assert describe(config, DType.FLOAT32, num_tokenizer_ids=1000).vocab_size == VOCAB_ROWS


def edit_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_head_is_the_embedding_even_where_the_files_have_one(tmp_path: Path) -> None:
    """Case H042 a and b: an lm_head that is also in the files changes nothing."""
    folder = make_tiny("LlamaForCausalLM", tmp_path, tie_word_embeddings=True)
    expected = Rig(load_model(folder)).run([1, 2, 3], [3])
    edit_weights(folder, lambda weights: weights | {"lm_head.weight": torch.randn(VOCAB_ROWS, 64)})
    assert torch.equal(Rig(load_model(folder)).run([1, 2, 3], [3]), expected)


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    """Case H042 d."""
    folder = make_tiny("LlamaForCausalLM", tmp_path)
    edit_weights(folder, lambda weights: {n: t for n, t in weights.items() if n != "lm_head.weight"})
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        load_model(folder)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    folder, name = make_tiny("Qwen3ForCausalLM", tmp_path), "model.layers.1.self_attn.q_norm.weight"
    edit_weights(folder, lambda weights: {n: t for n, t in weights.items() if n != name})
    with pytest.raises(ModelLoadError, match=name):
        load_model(folder)


def test_a_weight_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = make_tiny("LlamaForCausalLM", tmp_path)
    config = read_config(folder) | {"intermediate_size": 48}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"gate_proj.*\[96, 64\].*\[48, 64\]"):
        load_model(folder)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_sees(prefix: str, tmp_path: Path) -> None:
    folder = make_tiny("Gemma3ForCausalLM", tmp_path)
    expected = Rig(load_model(folder)).run([5, 6, 7, 8], [4])
    edit_weights(folder, lambda weights: {n.replace("model.", prefix, 1): t for n, t in weights.items()})
    text = read_config(folder)
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load_model(folder)
    assert isinstance(model, Gemma3ForConditionalGeneration)
    assert torch.equal(Rig(model).run([5, 6, 7, 8], [4]), expected)


def test_older_gemma_configurations_have_two_ropes() -> None:
    config = {
        "num_hidden_layers": 7,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 1000,
    }
    decoder = Gemma3ForCausalLM.read_config(config)
    assert [window > 0 for window in decoder.windows] == [True] * 5 + [False] + [True]
    local, everywhere = decoder.ropes[0], decoder.ropes[5]
    assert (local.theta, local.rope_type) == (1e4, "default")
    assert (everywhere.theta, everywhere.rope_type, everywhere.factor) == (1e6, "linear", 8.0)
    assert local.max_model_len == everywhere.max_model_len == 1000  # the configuration's length is the stretched one


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="use_bidirectional_attention"):
        Gemma3ForCausalLM.read_config({"use_bidirectional_attention": True})
    with pytest.raises(ModelLoadError, match="text_config"):
        Gemma3ForConditionalGeneration.read_config({})

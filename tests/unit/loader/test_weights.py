"""What models get: cut, fused and stacked sources, the head tied or not, and books of what was used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.backend.schemes import SCHEMES
from core.errors import ModelLoadError
from core.layers import WeightSlice, WeightStore
from core.loader import ModelWeights, open_checkpoint

FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def part(name: str, shape: tuple[int, int], rows: tuple[int, int] | None = None, cols: tuple[int, int] | None = None):
    return WeightSlice(name=name, shape=shape, rows=rows or (0, shape[0]), cols=cols or (0, shape[1]))


@pytest.fixture
def weights_of(folder_of):
    """A store over a folder of the given tensors; tied unless a head is among them."""

    def make(tensors, config=None, progress=None):
        config = {"tie_word_embeddings": HEAD not in tensors, **(config or {})}
        return ModelWeights(open_checkpoint(folder_of([tensors], config)), progress)

    return make


def test_it_is_the_store_that_layers_ask_for(weights_of):
    store: WeightStore = weights_of({"a": torch.ones(2, 3)})
    assert "a" in store
    assert (store.shape("a"), store.scheme("a")) == ((2, 3), "none")
    with pytest.raises(ModelLoadError, match="no tensor b"):
        store.shape("b")


def heads(weights_of, tied: bool, *names: str) -> ModelWeights:
    tensors = {name: torch.full((4, 2), float(number)) for number, name in enumerate(names)}
    return weights_of(tensors, {"tie_word_embeddings": tied})


def test_tied_without_a_head_shares_the_embedding(weights_of):
    """H042 a: tie=true and no lm_head in the files; the model multiplies by the embedding."""
    weights = heads(weights_of, True, EMBEDDING)
    assert weights.tied
    assert HEAD not in weights


def test_tied_with_a_copy_of_the_head_ignores_it(weights_of):
    """H042 b: tie=true and lm_head in the files; it loads, reports nothing unknown, and the copy is not used."""
    weights = heads(weights_of, True, EMBEDDING, HEAD)
    weights.tensor(EMBEDDING)
    assert weights.tied
    assert HEAD not in weights
    assert weights.unused() == ()
    with pytest.raises(ModelLoadError, match=HEAD):
        weights.tensor(HEAD)


def test_untied_head_is_the_one_of_the_file(weights_of):
    """H042 c: tie=false and a distinct lm_head; it is not the embedding."""
    weights = heads(weights_of, False, EMBEDDING, HEAD)
    assert not weights.tied
    assert weights.source([part(HEAD, (4, 2))]).dense(torch.float32).unique().tolist() == [1.0]
    assert weights.tensor(EMBEDDING).unique().tolist() == [0.0]


def test_untied_without_a_head_is_refused_by_name(weights_of):
    """H042 d: tie=false and no lm_head; start-up error that names lm_head.weight."""
    with pytest.raises(ModelLoadError, match=r"lacks lm_head\.weight .*does not tie"):
        heads(weights_of, False, EMBEDDING)


@pytest.mark.parametrize(("model_type", "tied"), [("gemma3_text", True), ("llama", False)])
def test_configuration_that_is_silent_follows_its_model_type(folder_of, model_type, tied):
    folder = folder_of([{HEAD: torch.ones(1, 1)}], {"model_type": model_type})
    config = (folder / "config.json").read_text().replace('"tie_word_embeddings": false, ', "")
    (folder / "config.json").write_text(config)
    assert ModelWeights(open_checkpoint(folder)).tied is tied


def test_cut_of_a_dense_weight_is_a_view_of_its_rows_and_columns(weights_of):
    weight = torch.randn(6, 8)
    source = weights_of({"a": weight}).source([part("a", (6, 8), rows=(2, 3), cols=(4, 4))])
    assert (source.shape, source.scheme, source.name) == ((3, 4), "none", "a")
    assert torch.equal(source.parts()["weight"], weight[2:5, 4:])
    assert torch.equal(source.dense(torch.bfloat16), weight[2:5, 4:].to(torch.bfloat16))


def test_fused_dense_weights_lie_one_below_the_other(weights_of):
    query, key, value = torch.randn(4, 8), torch.randn(2, 8), torch.randn(2, 8)
    weights = weights_of({"q": query, "k": key, "v": value})
    slices = [part("q", (4, 8), rows=(2, 2)), part("k", (2, 8), rows=(1, 1)), part("v", (2, 8), rows=(1, 1))]
    source = weights.source(slices)
    wanted = torch.cat([query[2:], key[1:], value[1:]])
    assert (source.shape, source.name) == ((4, 8), "q+k+v")
    assert torch.equal(source.parts()["weight"], wanted)
    assert torch.equal(source.dense(torch.float32), wanted)


@pytest.fixture
def gguf_weights(gguf_of):
    values = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    tensors = {f"blk.0.ffn_{stem}.weight": (values, kind) for stem, kind in (("gate", "Q4_1"), ("up", "Q4_1"))}
    tensors["blk.0.ffn_down.weight"] = (values, "Q5_0")
    return ModelWeights(open_checkpoint(gguf_of(metadata={"feed_forward_length": 8}, tensors=tensors)))


def mlp(stem: str, **cut: tuple[int, int]) -> WeightSlice:
    return part(f"model.layers.0.mlp.{stem}_proj.weight", (8, 64), **cut)


def test_fused_weights_of_one_scheme_stay_quantized(gguf_weights):
    source = gguf_weights.source([mlp("gate", rows=(2, 4)), mlp("up", rows=(2, 4))])
    assert (source.scheme, source.shape) == ("q4_1", (8, 64))
    parts = source.parts()
    assert (parts["weight"].dtype, parts["weight"].shape) == (torch.uint8, (8, 2 * 20))
    dense = source.dense(torch.float32)
    assert torch.equal(SCHEMES["q4_1"].dequantize(parts), dense)
    assert torch.equal(dense[:4], gguf_weights.source([mlp("gate")]).dense(torch.float32)[2:6])


def test_fused_weights_of_different_schemes_are_dense(gguf_weights):
    source = gguf_weights.source([mlp("gate"), mlp("down")])
    assert source.scheme == "none"
    wanted = torch.cat([gguf_weights.tensor(mlp(stem).name) for stem in ("gate", "down")])
    assert torch.equal(source.dense(torch.float32), wanted)
    assert torch.equal(source.parts()["weight"], wanted)


def test_cut_through_a_block_is_refused_quantized_and_possible_dense(gguf_weights):
    source = gguf_weights.source([mlp("down", cols=(16, 32))])
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight: cannot cut \[16, 48\).*\(8, 64\).*multiples of 32"):
        source.parts()
    assert torch.equal(source.dense(torch.float32), gguf_weights.tensor(mlp("down").name)[:, 16:48])


def block_fp8(name: str, rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(rows, 128).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.rand(-(-rows // 128), 1)}


def test_blocks_are_fused_where_they_end_at_the_border(weights_of):
    tensors = block_fp8("a.weight", 128) | block_fp8("b.weight", 64)
    weights = weights_of(tensors, {"quantization_config": FP8_BLOCK})
    source = weights.source([part("a.weight", (128, 128)), part("b.weight", (64, 128))])
    assert torch.equal(SCHEMES["fp8_block"].dequantize(source.parts()), source.dense(torch.float32))
    wrong = weights.source([part("b.weight", (64, 128)), part("a.weight", (128, 128))])
    with pytest.raises(ModelLoadError, match=r"b\.weight has 64 rows here, fp8_block is fused at multiples of 128"):
        wrong.parts()
    assert wrong.dense(torch.float32).shape == (192, 128)


def test_weights_with_one_scale_each_can_be_fused(weights_of):
    tensors = {f"{name}.weight": torch.randn(2, 4).to(torch.float8_e4m3fn) for name in "ab"}
    tensors |= {"a.weight_scale": torch.tensor(2.0), "b.weight_scale": torch.tensor(3.0)}
    weights = weights_of(tensors, {"quantization_config": {"quant_method": "fp8"}})
    source = weights.source([part("a.weight", (2, 4)), part("b.weight", (2, 4))])
    assert source.scheme == weights.scheme("a.weight") == "fp8_channel"
    assert source.parts()["scale"].flatten().tolist() == [2, 2, 3, 3]
    assert torch.equal(SCHEMES["fp8_channel"].dequantize(source.parts()), source.dense(torch.float32))


def test_experts_are_stacked_in_order(weights_of):
    tensors = {f"e{expert}.{name}": torch.randn(2, 4) for expert in range(3) for name in ("gate", "up")}
    weights = weights_of(tensors)
    slices = [[part(f"e{expert}.{name}", (2, 4)) for name in ("gate", "up")] for expert in range(3)]
    source = weights.stacked(slices)
    wanted = torch.stack([torch.cat([tensors[f"e{expert}.gate"], tensors[f"e{expert}.up"]]) for expert in range(3)])
    assert source.shape == (3, 4, 4)
    assert torch.equal(source.parts()["weight"], wanted)
    assert torch.equal(source.dense(torch.float32), wanted)
    with pytest.raises(ModelLoadError, match=r"experts e0\.gate.* and e1\.gate.* differ"):
        weights.stacked([slices[0], slices[1][:1]])


def test_missing_weights_are_named_before_anything_is_read(weights_of):
    seen = []
    weights = weights_of({"a": torch.ones(1, 1)}, progress=lambda done, total: seen.append(done))
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors of LlamaForCausalLM: b"):
        weights.source([part("a", (1, 1)), part("b", (1, 1))])
    with pytest.raises(ModelLoadError, match=r"lacks 12 tensors .*n0, .*n7 and 4 more"):
        weights.require([f"n{number}" for number in range(12)])
    assert seen == []


def test_tensors_that_nobody_asked_for_are_reported(weights_of):
    names = ("used", "forgotten", "model.layers.0.self_attn.rotary_emb.inv_freq")
    weights = weights_of({name: torch.ones(1, 1) for name in names})
    weights.source([part("used", (1, 1))])
    assert weights.unused() == ("forgotten",)


def test_progress_counts_each_tensor_once(weights_of):
    seen = []
    weights = weights_of(
        {"a": torch.ones(2, 2), "b": torch.ones(3)}, progress=lambda done, total: seen.append((done, total))
    )
    source = weights.source([part("a", (2, 2))])
    source.parts()
    source.dense(torch.float32)
    weights.tensor("b")
    assert seen == [(16, 28), (28, 28)]


@pytest.mark.parametrize("rows", [(6, 3), (-1, 2), (0, 0)])
def test_cut_outside_of_a_quantized_weight_is_refused(gguf_weights, rows):
    with pytest.raises(ModelLoadError, match="cannot cut"):
        gguf_weights.source([mlp("down", rows=rows)]).parts()

"""Opening folders: completeness is proved before anything is read, and every refusal names file and remedy."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from core.errors import ModelLoadError, ModelNotFoundError
from core.loader import open_checkpoint
from core.loader.safetensors_checkpoint import SafetensorsCheckpoint

INDEX = "model.safetensors.index.json"


def test_single_file_gives_its_tensors_as_stored(folder_of):
    weight = torch.randn(3, 5).to(torch.bfloat16)
    with open_checkpoint(folder_of([{"lm_head.weight": weight}])) as checkpoint:
        info = checkpoint.info("lm_head.weight")
        assert (info.shape, info.scheme, info.dtype, info.nbytes) == ((3, 5), "none", "bfloat16", 30)
        assert torch.equal(checkpoint.load("lm_head.weight"), weight)
        assert checkpoint.load_quantized("lm_head.weight") is None
        assert checkpoint.architecture == "LlamaForCausalLM"


def test_tensors_outlive_the_checkpoint_and_loading_from_a_closed_one_is_refused(folder_of):
    checkpoint = open_checkpoint(folder_of([{"a": torch.arange(6.0)}]))
    tensor = checkpoint.load("a")
    checkpoint.close()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ModelLoadError, match="closed"):
        checkpoint.load("a")


def test_sharded_folder_gives_all_tensors(folder_of, shards):
    with open_checkpoint(folder_of(shards)) as checkpoint:
        assert sorted(checkpoint.names()) == ["lm_head.weight", "model.t0", "model.t1", "model.t2"]
        assert checkpoint.load("model.t2")[0, 0] == 2


def test_generation_config_and_dtype_come_along(folder_of):
    folder = folder_of([{"a": torch.ones(1)}], {"dtype": None, "torch_dtype": "float16"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.generation_config["eos_token_id"] == [1, 106]
        assert checkpoint.config["dtype"] == "float16"


@pytest.mark.parametrize("quantization", [None, {"quant_method": "fp8", "weight_block_size": [128, 128]}])
@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_named_before_anything_is_read(folder_of, shards, quantization, index, monkeypatch):
    """H041: a shard of the index that is not on disk fails the start, dense or quantized, with the file's name."""
    monkeypatch.setattr(SafetensorsCheckpoint, "load", lambda *args: pytest.fail("a tensor was read"))
    folder = folder_of(shards, {"quantization_config": quantization}, index=index)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks 1 .*model-00002-of-00003\.safetensors.*fetch"):
        open_checkpoint(folder)


def test_all_missing_shards_are_named(folder_of, shards):
    """H041: the message lists every missing file."""
    folder = folder_of(shards)
    for number in (1, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(folder)
    assert "model-00001-of-00003" in str(caught.value)
    assert "model-00003-of-00003" in str(caught.value)
    assert "model-00002-of-00003" not in str(caught.value)


def test_folder_without_weight_files_says_what_is_needed(tmp_path):
    """H041: a directory with no weight files at all."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"no weight files: model\.safetensors"):
        open_checkpoint(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: pickled weights can run code.*convert"):
            open_checkpoint(path)


def test_nothing_at_the_path(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no model at"):
        open_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated_file_is_named(folder_of, keep):
    folder = folder_of([{"a": torch.ones(64)}])
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged or cut short"):
        open_checkpoint(folder)


def test_corrupt_header_is_named(folder_of):
    folder = folder_of([{"a": torch.ones(64)}])
    file = folder / "model.safetensors"
    file.write_bytes(b"\x10" + bytes(7) + b"not json at all." + bytes(256))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged"):
        open_checkpoint(folder)


def test_tensor_of_the_index_that_is_not_in_its_shard_is_named(folder_of, shards):
    folder = folder_of(shards)
    save_file({"other": torch.ones(1)}, folder / "model-00002-of-00003.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.t1 \(model-00002"):
        open_checkpoint(folder)


def test_tensor_in_two_shards_is_named(folder_of, shards):
    folder = folder_of(shards)
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")
    with pytest.raises(ModelLoadError, match=r"is in model-00001-of-00003\.safetensors and in model-00002"):
        open_checkpoint(folder)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": "../elsewhere.safetensors"}, {"a": 3}])
def test_unusable_index_is_named(folder_of, shards, weight_map):
    folder = folder_of(shards)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match="index"):
        open_checkpoint(folder)


def test_tensor_twice_in_the_index_is_named(folder_of, shards):
    folder = folder_of(shards)
    name = "model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(f'{{"weight_map": {{"model.t0": "{name}", "model.t0": "{name}"}}}}')
    with pytest.raises(ModelLoadError, match=r"has model\.t0 twice"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"architectures": []}'])
def test_unusable_config_is_named(folder_of, text):
    folder = folder_of([{"a": torch.ones(1)}])
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_checkpoint(folder)


def test_unknown_tensor_names_similar_ones(folder_of):
    with (
        open_checkpoint(folder_of([{"model.norm.weight": torch.ones(1)}])) as checkpoint,
        pytest.raises(ModelLoadError, match=r"no tensor model\.norms\.weight; similar: model\.norm\.weight"),
    ):
        checkpoint.load("model.norms.weight")


def test_file_of_a_folder_is_refused_with_the_folder(folder_of):
    folder = folder_of([{"a": torch.ones(1)}])
    with pytest.raises(ModelLoadError, match="give its folder"):
        open_checkpoint(folder / "model.safetensors")

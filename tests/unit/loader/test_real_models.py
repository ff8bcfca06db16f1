"""Real weights: what the loader makes of a GGUF file is the model, to the last bit where another reader exists."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from core.errors import ModelNotFoundError
from core.loader import Checkpoint, ModelWeights, open_checkpoint, pull, resolve_model

pytestmark = pytest.mark.model

CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM)}

# "The capital of France is", then " Paris", in the ids of each model's vocabulary.
SMOLLM2_PROMPT, SMOLLM2_PARIS = [504, 3575, 282, 4649, 314], 7042
GEMMA_PROMPT, GEMMA_PARIS = [2, 818, 5279, 529, 7001, 563], 9079

# "The history of the city goes back more than two thousand years. It was founded by the Romans, who built a bridge
# across the river and a small fort on the northern bank. Over the centuries it grew into one of the largest trading
# centres in Europe."
SMOLLM2_TEXT = [
    *(504, 1463, 282, 260, 2240, 3935, 1056, 540, 670, 827, 7557, 929, 30, 657, 436, 7498, 411, 260, 12990, 28, 617),
    *(2837, 253, 7395, 1699, 260, 4626, 284, 253, 1165, 5601, 335, 260, 5761, 5461, 30, 3636, 260, 5034, 357, 6679),
    *(618, 582, 282, 260, 3995, 10263, 16432, 281, 1910, 30),
]
GEMMA_TEXT = [
    *(2, 818, 4083, 529, 506, 3207, 5899, 1063, 919, 1082, 1156, 13460, 1518, 236761, 1030, 691, 16311, 684, 506),
    *(51386, 236764, 1015, 5284, 496, 11825, 3418, 506, 8858, 532, 496, 1944, 7845, 580, 506, 16962, 4856, 236761),
    *(7178, 506, 24744, 625, 13958, 1131, 886, 529, 506, 7488, 12376, 24237, 528, 3879, 236761),
]


def pulled(name: str) -> Path:
    try:
        return resolve_model(name)
    except ModelNotFoundError:
        pass
    try:
        return pull(name)
    except ModelNotFoundError as error:
        pytest.skip(f"the weights of {name} cannot be pulled: {error}")


def hugging_face_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """Hugging Face's model with the checkpoint's configuration and weights."""
    config_class, model_class = CLASSES[checkpoint.config["model_type"]]
    config = config_class(**{key: value for key, value in checkpoint.config.items() if key != "architectures"})
    with torch.device("meta"):
        model = model_class(config)
    state = {name: checkpoint.load(name).float() for name in checkpoint.names()}
    if ModelWeights(checkpoint).tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    # Tables that are no weights are still on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    if hasattr(model.model.embed_tokens, "embed_scale"):
        model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    return model.eval()


def perplexity(model: PreTrainedModel, ids: list[int]) -> float:
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        return float(model(tokens, labels=tokens).loss.exp())


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Checkpoint]:
    with open_checkpoint(pulled("smollm2-135m-instruct")) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def gemma3() -> Iterator[Checkpoint]:
    with open_checkpoint(pulled("gemma3-270m")) as checkpoint:
        yield checkpoint


def test_smollm2_knows_its_capitals_and_reads_english(smollm2):
    model = hugging_face_model(smollm2)
    with torch.inference_mode():
        assert int(model(torch.tensor([SMOLLM2_PROMPT])).logits[0, -1].argmax()) == SMOLLM2_PARIS
    # Measured 10.5; a wrong row order of queries and keys gives hundreds.
    assert perplexity(model, SMOLLM2_TEXT) < 12


def test_every_weight_of_smollm2_is_the_one_that_transformers_reads(smollm2):
    config = LlamaConfig(**{key: value for key, value in smollm2.config.items() if key != "architectures"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    theirs = load_gguf_checkpoint(str(smollm2.path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(smollm2.names()) == set(theirs)
    for name in smollm2.names():
        assert torch.equal(smollm2.load(name), theirs[name]), name


def test_gemma3_reads_english(gemma3):
    model = hugging_face_model(gemma3)
    with torch.inference_mode():
        likely = model(torch.tensor([GEMMA_PROMPT])).logits[0, -1].topk(10).indices.tolist()
    assert GEMMA_PARIS in likely
    # Measured 7.8; norms without their offset, or one rope base for all layers, give far more.
    assert perplexity(model, GEMMA_TEXT) < 10


@pytest.fixture
def one_thread() -> Iterator[None]:
    """CPU seconds mean work: threads of a busy machine spin while they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_gemma3_is_dequantized_in_seconds(gemma3):
    assert {gemma3.info(name).scheme for name in gemma3.names()} == {"none", "q8_0", "q5_0", "q4_k", "q6_k"}
    begin = time.process_time()
    for name in gemma3.names():
        gemma3.load(name)
    # Measured 1.7 CPU seconds.
    assert time.process_time() - begin < 10


def test_rows_of_a_quantized_embedding_are_gathered_without_the_rest(gemma3):
    embedding = gemma3.load_quantized("model.embed_tokens.weight")
    assert embedding is not None
    rows = torch.tensor([0, 262143, 9079])
    gathered = embedding.take_rows(rows).dequantize()
    assert torch.equal(gathered, gemma3.load("model.embed_tokens.weight")[rows])

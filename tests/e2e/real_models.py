"""The two small real models of the package index, and what transformers makes of them in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from core.errors import ModelNotFoundError
from core.loader import ModelWeights, open_checkpoint, pull

__all__ = ["MODELS", "RealModel", "pulled", "reference_logits"]

_CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM)}
_PLAIN = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""For a model without a template: what was said, and nothing else."""


@dataclass(frozen=True)
class RealModel:
    """A model with a question that it answers rightly.

    Args:
        name: As `core pull` knows it.
        question: For chat completions.
        answer: Part of the right answer.
        flags: What `core serve` needs besides.
    """

    name: str
    question: str
    answer: str
    flags: tuple[str, ...] = ()


MODELS = (
    RealModel("smollm2-135m-instruct", "What is the capital of France?", "Paris"),
    RealModel("gemma3-270m", "The opposite of hot is", "cold", ("--chat-template", _PLAIN)),
)


def pulled(name: str) -> Path:
    """Where the model is; pulls it, and skips the test where that cannot be."""
    try:
        return pull(name)
    except ModelNotFoundError as error:
        pytest.skip(f"the weights of {name} cannot be pulled: {error}")


def reference_model(path: Path) -> PreTrainedModel:
    """Hugging Face's model in float32, with the numbers that the file holds."""
    with open_checkpoint(path) as checkpoint:
        config_class, model_class = _CLASSES[checkpoint.config["model_type"]]
        config = config_class(**{k: v for k, v in checkpoint.config.items() if k not in ("architectures", "dtype")})
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


@torch.inference_mode()
def reference_logits(path: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Logits [length, vocabulary] of each sequence, float32; all in one batch, padded at the end."""
    longest = max(map(len, sequences))
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in sequences])
    logits = reference_model(path)(tokens).logits
    return [logits[i, : len(ids)] for i, ids in enumerate(sequences)]

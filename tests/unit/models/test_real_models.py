"""Real weights: logits of SmolLM2 and Gemma 3 from GGUF files against transformers on the same files."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rig import BareBackend, Rig, load_model
from torch import Tensor

from core.backend import Verdict
from core.backend.ops import EmbedOp, LinearOp, OpSpec
from core.backend.reference import COMPOSITES
from core.loader.hub import pull
from core.spec import DType

pytestmark = pytest.mark.model

TEXT = "The capital of France is Paris, a city on the river Seine. It has been"
BLOCKS = 40


class KernelBackend(BareBackend):
    """Calls linear and embed on GGUF weights NATIVE, and runs them by the reference."""

    def __init__(self) -> None:
        super().__init__(lambda op: Verdict.native() if isinstance(op, LinearOp | EmbedOp) else None)

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        return COMPOSITES[op.name](op)


def gguf_file(name: str) -> Path:
    """The model's file; pulled where it is not on disk yet."""
    path = pull(name)
    return path if path.is_file() else next(path.glob("*.gguf"))


@torch.inference_mode()
def expected_logits(path: Path) -> tuple[list[int], Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens: list[int] = tokenizer(TEXT)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    logits: Tensor = model.eval()(torch.tensor([tokens])).logits[0]
    del model
    gc.collect()
    return tokens, logits


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m"])
def test_logits_of_real_weights(name: str) -> None:
    """Dequantized at load and kept quantized: the same float32 numbers, so the same logits."""
    path = gguf_file(name)
    tokens, expected = expected_logits(path)
    chunks = [7, 1, 1, len(tokens) - 9]
    for backend in (BareBackend(), KernelBackend()):
        got = Rig(load_model(path, backend=backend, max_model_len=256), num_blocks=BLOCKS).run(tokens, chunks)
        error = (got[:, : expected.shape[1]] - expected).abs().max()
        assert float(error) < 2e-3 * float(expected.abs().max())
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        gc.collect()


def test_dtype_of_the_activations_is_ours_to_choose() -> None:
    path = gguf_file("smollm2-135m-instruct")
    tokens, expected = expected_logits(path)
    got = Rig(load_model(path, dtype=DType.BFLOAT16, max_model_len=256), num_blocks=BLOCKS).run(tokens, [len(tokens)])
    relative = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(relative) < 0.05

"""Real weights: logits of SmolLM2 and Gemma 3 from GGUF files against transformers on the same files."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

TOKENS = random.Random(6).choices(range(1000, 30000), k=20)
BLOCKS = 40


class KernelBackend(BareBackend):
    """Calls linear and embed NATIVE whatever the scheme, and runs them by the reference."""

    def __init__(self) -> None:
        super().__init__(lambda op: Verdict.native() if isinstance(op, LinearOp | EmbedOp) else None)

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        return COMPOSITES[op.name](op)


@dataclass
class RealModel:
    """A file, and what transformers says of `TOKENS`."""

    path: Path
    expected: Tensor


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "gemma3-270m"])
def real(request: pytest.FixtureRequest) -> Iterator[RealModel]:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate")
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, 2))
    path = pull(request.param)
    path = path if path.is_file() else next(path.glob("*.gguf"))
    yield RealModel(path, expected_logits(path))
    torch.set_num_threads(threads)


@torch.inference_mode()
def expected_logits(path: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    logits: Tensor = model.eval()(torch.tensor([TOKENS])).logits[0]
    del model
    gc.collect()
    return logits


def test_logits_of_real_weights(real: RealModel) -> None:
    """Dequantized at load: the same float32 numbers, so the same logits, in chunks and decodes."""
    got = Rig(load_model(real.path, max_model_len=256), num_blocks=BLOCKS).run(TOKENS, [9, 1, 1, 9])
    assert float((got - real.expected).abs().max()) < 1e-3 * float(real.expected.abs().max())
    assert torch.equal(got.argmax(-1), real.expected.argmax(-1))


def test_weights_kept_quantized(real: RealModel) -> None:
    """The backend claims kernels for the file's schemes: nothing is dequantized at load, the logits are the same."""
    model = load_model(real.path, backend=KernelBackend(), max_model_len=256)
    assert "none" not in {choice.scheme for choice in model.weight_schemes()}
    got = Rig(model, num_blocks=BLOCKS).run(TOKENS, [20])
    assert float((got - real.expected).abs().max()) < 1e-3 * float(real.expected.abs().max())


def test_bfloat16_activations(real: RealModel) -> None:
    """On Gemma transformers' own error in bfloat16 is 0.044 of the logits' size; the bound is twice that."""
    got = Rig(load_model(real.path, dtype=DType.BFLOAT16, max_model_len=256), num_blocks=BLOCKS).run(TOKENS, [20])
    relative = (got - real.expected).square().mean().sqrt() / real.expected.square().mean().sqrt()
    assert float(relative) < 0.09

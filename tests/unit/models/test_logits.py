"""Logits of each architecture against transformers, however the work is cut into steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rig import Rig, load_model
from tiny import ARCHITECTURES, VOCAB_ROWS, make_tiny
from torch import Tensor

from core.backend.tripwire import Tripwire
from core.models import CausalLM
from core.spec import DType

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("LlamaForCausalLM", {"head_dim": 40, "num_key_value_heads": 1}),
    "llama-no-grouping": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-llama3": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2-yarn": (
        "Qwen2ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3-biases": ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": False}),
    "mistral-no-window": ("MistralForCausalLM", {"sliding_window": None}),
    "gemma3-softcap": ("Gemma3ForCausalLM", {"final_logit_softcapping": 5.0}),
    "gemma3-pattern": ("Gemma3ForCausalLM", {"layer_types": None, "sliding_window_pattern": 2}),
    "gemma3-scaled-global-rope": (
        "Gemma3ForCausalLM",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
}
LENGTH = 29
TOKENS = random.Random(5).choices(range(256), k=LENGTH)
TOLERANCE = 2e-4


class Case:
    """A tiny model, ours and transformers'."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wire = Tripwire()
        self.model = load_model(folder, tripwire=self.wire)
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.reference = reference.eval()

    def rig(self, model: CausalLM | None = None) -> Rig:
        return Rig(model or self.model, tripwire=self.wire)

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return logits


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture, overrides = VARIANTS[request.param]
    return Case(make_tiny(architecture, tmp_path_factory.mktemp("tiny"), **overrides))


def error(got: Tensor, expected: Tensor) -> float:
    assert got.dtype == torch.float32 and got.shape == expected.shape
    return float((got - expected).abs().max())


def test_whole_prompt(case: Case) -> None:
    got = case.rig().run(TOKENS, [LENGTH])
    assert got.shape[1] == VOCAB_ROWS
    assert error(got, case.expected(TOKENS)) < TOLERANCE
    assert float(case.expected(TOKENS).std()) > 0.3, "logits that are all alike prove nothing"


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_chunks_of_a_prompt(case: Case, chunk: int) -> None:
    chunks = [chunk] * (LENGTH // chunk) + [LENGTH % chunk] * (LENGTH % chunk > 0)
    assert error(case.rig().run(TOKENS, chunks), case.expected(TOKENS)) < TOLERANCE


def test_several_sequences_in_mixed_steps(case: Case) -> None:
    """Chunks and decodes of five sequences in the same steps, lengths from 1 to more than the window."""
    rig, dice = case.rig(), random.Random(3)
    sequences = [rig.start(dice.choices(range(256), k=length)) for length in (1, 5, 17, 23, 12)]
    found: dict[int, list[Tensor]] = {id(sequence): [] for sequence in sequences}
    while waiting := [s for s in sequences if s.num_computed < len(s.tokens)]:
        work = [(s, min(dice.choice([1, 1, 2, 6]), len(s.tokens) - s.num_computed)) for s in waiting]
        work.sort(key=lambda item: item[1])
        for (sequence, _), logits in zip(work, rig.step(work), strict=True):
            found[id(sequence)].append(logits)
    for sequence in sequences:
        assert error(torch.cat(found[id(sequence)]), case.expected(sequence.tokens)) < TOLERANCE


def test_bfloat16_is_as_near_as_transformers_in_bfloat16(case: Case) -> None:
    """A ratio, since an absolute bound would depend on the random weights."""
    model = load_model(case.folder, dtype=DType.BFLOAT16)
    exact = case.expected(TOKENS)
    plain = transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        theirs = plain(torch.tensor([TOKENS])).logits[0].float() - exact
    ours = Rig(model).run(TOKENS, [20, 9]) - exact
    assert float(ours.square().mean().sqrt()) <= 1.5 * float(theirs.square().mean().sqrt())


def test_a_forward_is_made_of_coarse_operations(case: Case) -> None:
    case.wire.operations.clear()
    case.rig().run(TOKENS, [LENGTH])
    layers = len(case.model.spec.layers)
    counts = {name: case.wire.operations.count(name) for name in set(case.wire.operations)}
    assert counts == {
        "embed": 1,
        "rms_norm": 1,
        "linear": 4 * layers + 1,
        "qk_norm_rope_write": layers,
        "attention": layers,
        "reduce_norm": 2 * layers,
        "act_mul": layers,
    }

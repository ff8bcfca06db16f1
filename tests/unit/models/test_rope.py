"""Rotary frequencies against transformers, and models whose frequencies depend on length."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rig import Rig, load_model
from tiny import make_tiny
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core.backend.tripwire import Tripwire
from core.errors import ModelLoadError
from core.layers.rope_config import RopeConfig, parse_rope
from core.layers.rope_frequencies import attention_factor, frequencies, frequencies_for_lengths
from core.models import describe
from core.spec import DType

HEAD_DIM = 64
SHORT = [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)]
LONG = [2.0 + 0.5 * i for i in range(HEAD_DIM // 2)]
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
    "yarn-whole": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-magnitudes": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn-attention": {"rope_type": "yarn", "factor": 64.0, "attention_factor": 1.1},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 256,
    },
    "longrope-factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
    },
    "longrope-attention": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 256,
    },
}


def config_of(settings: dict[str, Any], **fields: Any) -> dict[str, Any]:
    rope = {"rope_theta": 10000.0, **settings}
    return {"max_position_embeddings": 2048, **fields, "rope_parameters": rope}


@pytest.mark.parametrize("length", [1, 255, 256, 257, 2048, 5000])
@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_equal_those_of_transformers(name: str, length: int) -> None:
    config = config_of(SETTINGS[name])
    rope = parse_rope(config, HEAD_DIM)
    theirs = LlamaConfig(head_dim=HEAD_DIM, hidden_size=256, num_attention_heads=4, **config)
    expected, factor = ROPE_INIT_FUNCTIONS[rope.rope_type](theirs, torch.device("cpu"), seq_len=length)
    torch.testing.assert_close(frequencies_for_lengths(rope, torch.tensor([length]))[0], expected, rtol=2e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-9)


def test_plain_frequencies() -> None:
    rope = parse_rope({"rope_theta": 500.0, "max_position_embeddings": 64}, 8)
    torch.testing.assert_close(frequencies(rope), 500.0 ** -(torch.arange(4) / 4))


def test_each_length_has_its_own_frequencies() -> None:
    rope = parse_rope(config_of(SETTINGS["dynamic"]), HEAD_DIM)
    lengths = torch.tensor([100, 2048, 4096, 9000], dtype=torch.int32)
    rows = frequencies_for_lengths(rope, lengths)
    for row, length in zip(rows, lengths, strict=True):
        torch.testing.assert_close(row, frequencies_for_lengths(rope, length[None])[0])
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[1], rows[2])


@pytest.mark.parametrize(
    ("base", "length", "expected"),
    [
        (10000, 1024, 10000.0),
        (10000, 2048, 10000.0),
        (10000, 4096, 31082.24),
        (10000, 8192, 74534.83),
        (1000, 512, 1000.0),
    ],
)
def test_dynamic_base_follows_the_actual_length(base: float, length: int, expected: float) -> None:
    """Case H043: the base grows with the sequence, and a served length below the trained one changes nothing."""
    config = {
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": base},
    }
    found = frequencies_for_lengths(parse_rope(config, 64), torch.tensor([length]))[0]
    assert not found.isnan().any()
    # The second frequency is base^(-2/64).
    assert float(found[1].double() ** -32) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "multiplier"),
    [
        ({"factor": 16}, 1.277259),
        ({"factor": 16, "mscale": 1, "mscale_all_dim": 1}, 1.0),
        ({"factor": 64, "attention_factor": 1.0}, 1.0),
        ({"factor": 64}, 1.415888),
    ],
)
def test_yarn_magnitude_follows_the_configuration(settings: dict[str, float], multiplier: float) -> None:
    """Case H044: what multiplies cosines and sines."""
    rope = parse_rope(config_of({"rope_type": "yarn", **settings}), HEAD_DIM)
    assert attention_factor(rope) == pytest.approx(multiplier, abs=1e-6)


def test_older_spelling_of_the_settings() -> None:
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 64}
    new = {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        "max_position_embeddings": 64,
    }
    assert parse_rope(old, 8) == parse_rope(new, 8)
    assert parse_rope({"rope_theta": 500.0, "rope_scaling": None}, 8).rope_type == "default"


def test_a_part_of_a_head_is_rotated_where_the_architecture_can() -> None:
    config = {"rope_theta": 100.0, "partial_rotary_factor": 0.25}
    assert parse_rope(config, 64, partial=True).rotary_dim == 16
    with pytest.raises(ModelLoadError, match=r"partial_rotary_factor 0\.25"):
        parse_rope(config, 64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "spiral"}, "'spiral'.*supported are default, linear"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor 0.5"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "1 values for 32 rotary pairs"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse_rope(config_of(settings), HEAD_DIM)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        (SETTINGS["llama3"], 2048),
        (SETTINGS["longrope"], 2048),
    ],
)
def test_how_long_a_sequence_may_be(settings: dict[str, Any], expected: int) -> None:
    rope = parse_rope(config_of(settings), HEAD_DIM)
    assert rope.max_model_len == expected


# -- models whose angles depend on the length of the sequence ----------------------------------------------------------

TRAINED = 16
TOKENS = random.Random(2).choices(range(256), k=30)
LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
    "dynamic": {
        "max_position_embeddings": TRAINED,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
    },
    "longrope": {
        "max_position_embeddings": 4 * TRAINED,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0 + 0.2 * i for i in range(8)],
            "long_factor": [3.0 + i for i in range(8)],
            "original_max_position_embeddings": TRAINED,
        },
    },
}


class LengthCase:
    def __init__(self, folder: Path) -> None:
        self.wire = Tripwire()
        self.model = load_model(folder, tripwire=self.wire)
        self.folder = folder

    def rig(self) -> Rig:
        return Rig(self.model, tripwire=self.wire)

    @torch.inference_mode()
    def expected(self, tokens: list[int], chunks: list[int]) -> Tensor:
        """A fresh reference: transformers keeps the longest length it has seen."""
        reference = transformers.AutoModelForCausalLM.from_pretrained(self.folder, attn_implementation="eager").eval()
        cache, parts, start = transformers.DynamicCache(), [], 0
        for count in chunks:
            ids = torch.tensor([tokens[start : start + count]])
            parts.append(reference(ids, cache=cache, use_cache=True).logits[0])
            start += count
        return torch.cat(parts)


@pytest.fixture(scope="module", params=list(LENGTH_DEPENDENT))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LengthCase:
    folder = tmp_path_factory.mktemp("tiny")
    return LengthCase(make_tiny("LlamaForCausalLM", folder, **LENGTH_DEPENDENT[request.param]))


@pytest.mark.parametrize(
    "chunks", [[30], [12], [TRAINED], [TRAINED + 1], [10, 10, 10], [14, 1, 1, 1, 1, 1, 1]], ids=str
)
def test_single_request_equals_transformers(case: LengthCase, chunks: list[int]) -> None:
    """Case H043 in a model: below, at and above the trained length, and decoding across it."""
    tokens = TOKENS[: sum(chunks)]
    got = case.rig().run(tokens, chunks)
    assert float((got - case.expected(tokens, chunks)).abs().max()) < 2e-4


def test_neighbours_do_not_change_the_angles(case: LengthCase) -> None:
    """Short and long sequences in one step, each with the frequencies of its own length."""
    rig = case.rig()
    texts = [TOKENS[:5], TOKENS[5:17], TOKENS]
    got = rig.step([(rig.start(tokens), len(tokens)) for tokens in texts])
    for tokens, logits in zip(texts, got, strict=True):
        assert float((logits - case.rig().run(tokens, [len(tokens)])).abs().max()) < 1e-5


def test_forward_prepares_what_the_runner_did_not(case: LengthCase) -> None:
    model = load_model(case.folder)
    rig = Rig(model)
    prepare, calls = model.prepare, []
    model.prepare = lambda batch: calls.append(batch)  # type: ignore[method-assign]
    expected = case.rig().run(TOKENS, [30])
    model.prepare = prepare  # type: ignore[method-assign]
    rig._forward = lambda batch, plans: model.forward(batch, plans, rig._caches)  # type: ignore[method-assign]
    assert torch.equal(rig.run(TOKENS, [30]), expected)


def test_a_served_length_below_the_trained_one_changes_nothing(case: LengthCase) -> None:
    """Case H043, last row: the length that is served never enters the frequencies."""
    model = load_model(case.folder, max_model_len=8)
    got = Rig(model).run(TOKENS[:8], [8])
    assert not got.isnan().any()
    assert torch.equal(got, case.rig().run(TOKENS[:8], [8]))


def test_the_model_says_how_long_it_can_be(case: LengthCase) -> None:
    rope: RopeConfig = next(iter(case.model.config.ropes))  # type: ignore[attr-defined]
    assert case.model.spec.max_model_len == rope.max_model_len in (2 * TRAINED, 4 * TRAINED)


def test_describe_needs_no_weights() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        **config_of(SETTINGS["linear"]),
    }
    assert describe(config, DType.BFLOAT16).max_model_len == 8192

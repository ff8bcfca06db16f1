"""Tensor parallelism: ranks in threads, whose sums meet at a barrier, give the logits of one rank."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rig import Rig, load_model, read_config
from tiny import make_tiny
from torch import Tensor

from core.backend.comm import SingleRank
from core.errors import ConfigError
from core.layers import ParallelContext
from core.layers.parallel import HeadSplit, split_heads
from core.models import CausalLM, describe
from core.spec import DType

TOKENS = random.Random(8).choices(range(256), k=21)
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 64}


class _Meeting:
    """Where the ranks of a world exchange tensors."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=60)
        self.parts: list[Tensor | None] = [None] * world


class ThreadRank(SingleRank):
    """One rank among threads; only the sum is needed by these models."""

    def __init__(self, meeting: _Meeting, rank: int, world: int) -> None:
        self._meeting = meeting
        self.rank, self.world = rank, world

    def all_reduce_(self, x: Tensor) -> Tensor:
        self._meeting.parts[self.rank] = x.clone()
        self._meeting.barrier.wait()
        total = sum(part for part in self._meeting.parts if part is not None)
        self._meeting.barrier.wait()
        return x.copy_(total)


def run_ranks(world: int, work: Callable[[ParallelContext], Tensor]) -> list[Tensor]:
    meeting = _Meeting(world)
    places = [ParallelContext.of(ThreadRank(meeting, rank, world)) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, places))


def logits_of(folder: Path, world: int) -> list[Tensor]:
    def work(place: ParallelContext) -> Tensor:
        model = load_model(folder, parallel=place)
        rig = Rig(model)
        long = rig.start(TOKENS)
        rig.step([(long, 10)])
        first, second = rig.step([(rig.start(TOKENS[:6]), 6), (long, 11)])
        return torch.cat([first, second])

    return run_ranks(world, work)


@torch.inference_mode()
def expected_of(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    first, second = (model(torch.tensor([tokens])).logits[0] for tokens in (TOKENS[:6], TOKENS))
    return torch.cat([first, second[10:]])


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {**HEADS, "attention_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", {**HEADS, "hidden_size": 256}),
        ("Qwen3ForCausalLM", HEADS),
        ("Gemma3ForCausalLM", HEADS),
    ],
)
def test_every_number_of_ranks_gives_the_same_logits(
    architecture: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """Case H046: KV heads are split, and replicated where there are more ranks than KV heads."""
    folder = make_tiny(architecture, tmp_path, **overrides)
    expected = expected_of(folder)
    for world in (1, 2, 4, 8):
        for logits in logits_of(folder, world):
            assert float((logits - expected).abs().max()) < 3e-4, f"{world} ranks"


def test_uneven_heads_are_refused_at_start(tmp_path: Path) -> None:
    """Case H046: both numbers in the message, before any weight is read."""
    folder = make_tiny("LlamaForCausalLM", tmp_path, **HEADS)
    with pytest.raises(ConfigError, match=r"32 attention heads.*3 tensor-parallel ranks"):
        load_model(folder, parallel=ParallelContext(rank=0, world=3))
    with pytest.raises(ConfigError, match=r"32 attention heads.*3 tensor-parallel ranks"):
        describe(read_config(folder), DType.FLOAT32, world=3)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "world", "message"),
    [(12, 6, 4, "6 KV heads.*4"), (12, 3, 4, "3 KV heads.*4"), (6, 6, 4, "6 attention heads.*4")],
)
def test_which_splits_are_refused(num_heads: int, num_kv_heads: int, world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_heads(num_heads, num_kv_heads, ParallelContext(world=world))


def test_uneven_feed_forward_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("LlamaForCausalLM", tmp_path, **HEADS, intermediate_size=98)
    with pytest.raises(ConfigError, match=r"98 outputs of .*gate_proj.*4 tensor-parallel"):
        load_model(folder, parallel=ParallelContext(rank=0, world=4))


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
def test_every_query_head_keeps_its_kv_head(world: int) -> None:
    num_heads, num_kv_heads = 16, 4
    for rank in range(world):
        split: HeadSplit = split_heads(num_heads, num_kv_heads, ParallelContext(rank=rank, world=world))
        assert split.num_heads * world == num_heads
        for head in range(split.num_heads):
            local = head // (split.num_heads // split.num_kv_heads)
            assert split.first_kv_head + local == (split.first_head + head) // (num_heads // num_kv_heads)


def test_the_cache_holds_this_ranks_heads(tmp_path: Path) -> None:
    config = read_config(make_tiny("LlamaForCausalLM", tmp_path, **HEADS))
    counts = {}
    for world in (1, 2, 4, 8):
        layer = describe(config, DType.FLOAT32, world=world).layers[0]
        assert layer is not None
        counts[world] = layer.num_kv_heads
    assert counts == {1: 4, 2: 2, 4: 1, 8: 1}


def test_a_rank_reads_its_share_alone(tmp_path: Path) -> None:
    model: CausalLM = load_model(make_tiny("LlamaForCausalLM", tmp_path, **HEADS), parallel=ParallelContext(world=4))
    layer = model._layers[0]  # type: ignore[attr-defined]
    shapes = [part.weight.shape for part in (layer.attention._qkv._parts[0], layer.attention._out)]
    assert shapes == [((8 + 2) * 8, 64), (64, 8 * 8)]

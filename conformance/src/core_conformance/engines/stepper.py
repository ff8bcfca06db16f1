"""Feeds chunks of sequences to a model on the backend under test, without an engine, and gives back every logit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.backend import Batch, GroupBatch, GroupSpec, KVSlab, Plan
from core.layers import BuildContext
from core.loader.checkpoint import open_checkpoint
from core.loader.weights import ModelWeights
from core.models.base import CausalLM
from core.models.registry import build_model
from core.spec import DType, KVCacheSpec
from core_conformance.engines.models import NUM_TOKENS, model_folder
from core_conformance.engines.quantized_models import QUANTIZED, gguf_file
from core_conformance.operations.cache_memory import int32, poison_byte
from core_conformance.subject import Subject

__all__ = ["Stepper", "Stream"]


@dataclass
class Stream:
    """One sequence: its tokens, how many were computed, and its blocks for each cache group."""

    tokens: Sequence[int]
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class Stepper:
    """A model with its cache: shuffled blocks, poison in all memory that nobody owns, null blocks outside of windows.

    Args:
        subject: The backend; its binder's table gets the model's operations.
        name: Which of the suite's models.
        dtype: Of activations and cache.
        num_blocks: Blocks of each layer, the null block included.
        quantized: A key of `QUANTIZED`, of that model; empty for weights as they are.
    """

    def __init__(self, subject: Subject, name: str, dtype: DType, num_blocks: int = 24, *, quantized: str = "") -> None:
        self._subject, self._block_size = subject, subject.block_size
        subject.model, subject.dtype = name, dtype.value
        subject.quantization = quantized
        self.model = _load(subject, name, dtype, quantized)
        specs = [spec for spec in self.model.spec.layers if spec is not None]
        self._groups: list[KVCacheSpec] = list(dict.fromkeys(specs))
        self._group_of = [self._groups.index(spec) for spec in specs]
        layouts = [subject.backend.kv_layout(spec, self._block_size) for spec in self._groups]
        ops = [tuple(layer) for layer in self.model.cache_ops if layer]
        self._specs = [
            GroupSpec(
                index=i,
                layout=layout,
                ops=tuple(op for g, layer in zip(self._group_of, ops, strict=True) if g == i for op in layer),
            )
            for i, layout in enumerate(layouts)
        ]
        self._caches = []
        for group in self._group_of:
            memory = subject.backend.arena("kv", num_blocks * layouts[group].block_bytes).tensor
            memory.fill_(poison_byte("nan", dtype))
            self._caches.append(KVSlab(tensor=memory, layout=layouts[group], num_blocks=num_blocks).views())
        self._free = list(range(1, num_blocks))
        random.Random(0).shuffle(self._free)

    def run(self, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Logits [len(tokens), vocabulary] of one sequence computed in those chunks, float64 on the host."""
        sequence = self.start(tokens)
        assert sum(chunks) == len(tokens)
        return torch.cat([self.step([(sequence, count)])[0] for count in chunks])

    def start(self, tokens: Sequence[int]) -> Stream:
        """A new sequence."""
        return Stream(tokens, blocks=[[] for _ in self._groups])

    def step(self, work: Sequence[tuple[Stream, int]]) -> list[Tensor]:
        """Computes so many tokens of each sequence; logits [n, vocabulary] for each. Few tokens must come first."""
        batch = self._batch(work)
        plans = [self._subject.backend.plan(batch, spec) for spec in self._specs]
        each: list[Plan | None] = [plans[group] for group in self._group_of]
        self.model.prepare(batch)
        logits = self._subject.get(self.model.logits(self.model.forward(batch, each, self._caches)))
        for sequence, count in work:
            sequence.num_computed += count
        return list(logits[:, :NUM_TOKENS].double().split([count for _, count in work]))

    def _batch(self, work: Sequence[tuple[Stream, int]]) -> Batch:
        put = self._subject.put
        starts = [0]
        ids: list[int] = []
        positions: list[int] = []
        for sequence, count in work:
            begin, end = sequence.num_computed, sequence.num_computed + count
            ids += list(sequence.tokens[begin:end])
            positions += range(begin, end)
            starts.append(starts[-1] + count)
        return Batch(
            num_reqs=len(work),
            num_tokens=starts[-1],
            num_decodes=sum(count == 1 for _, count in work),
            max_query_len=max(count for _, count in work),
            token_ids=put(int32(ids)),
            positions=put(int32(positions)),
            query_start_loc=put(int32(starts)),
            query_start_loc_host=starts,
            num_valid_tokens=put(int32(starts[-1:])),
            groups=tuple(self._group(index, work) for index in range(len(self._groups))),
            logits_indices=put(int32([end - 1 for end in starts[1:]])),
        )

    def _group(self, index: int, work: Sequence[tuple[Stream, int]]) -> GroupBatch:
        size, put = self._block_size, self._subject.put
        lens = [sequence.num_computed + count for sequence, count in work]
        width = max(-(-length // size) for length in lens)
        table, slots = [], []
        for (sequence, _), length in zip(work, lens, strict=True):
            blocks = sequence.blocks[index]
            while len(blocks) * size < length:
                blocks.append(self._free.pop())
            slots += [blocks[p // size] * size + p % size for p in range(sequence.num_computed, length)]
            row = self._visible(index, sequence, -(-length // size))
            table.append(row + [0] * (width - len(row)))
        return GroupBatch(
            block_table=put(int32(table)), slots=put(int32(slots)), seq_lens=put(int32(lens)), seq_lens_host=lens
        )

    def _visible(self, index: int, sequence: Stream, count: int) -> list[int]:
        window = self._groups[index].window
        hidden = max(0, sequence.num_computed - window + 1) // self._block_size if window else 0
        return [0] * hidden + sequence.blocks[index][hidden:count]


def _load(subject: Subject, name: str, dtype: DType, quantized: str) -> CausalLM:
    spec = QUANTIZED.get(quantized)
    path = gguf_file(quantized) if spec is not None and spec.is_file else model_folder(name)
    with open_checkpoint(path) as checkpoint:
        weights = ModelWeights(checkpoint)
        ctx = BuildContext(
            binder=subject.binder,
            dtype=dtype,
            weights=weights,
            num_tokenizer_ids=NUM_TOKENS,
            max_model_len=1024,
            quantization=None if spec is None or spec.is_file else spec.activations,
        )
        model = build_model(checkpoint.config, ctx)
        model.load(weights)
    return model

"""Runs a model of `core.models` step by step without an engine: a bare backend, a poisoned cache, shuffled blocks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.backend import Backend, Batch, GroupBatch, GroupSpec, KVSlab, OpenConfig, Plan, Verdict
from core.backend.negotiate import Binder
from core.backend.ops import OpSpec
from core.backend.tripwire import Tripwire
from core.layers import BuildContext, ParallelContext
from core.loader.checkpoint import open_checkpoint
from core.loader.weights import ModelWeights
from core.models import CausalLM, build_model
from core.spec import BackendInfo, Capabilities, DeviceInfo, DType, KVCacheSpec

BLOCK_SIZE = 4
INFO = BackendInfo(name="bare", vendor="nobody", api=(1, 0, 0), load="rig:BareBackend")
DEVICE = DeviceInfo(index=0, arch="none", memory_bytes=0, sdk="")


class BareBackend(Backend):
    """Every operation COMPOSITE, except where `verdict` says otherwise."""

    def __init__(self, verdict: Callable[[OpSpec], Verdict | None] = lambda op: None) -> None:
        self._verdict = verdict

    def probe(self) -> list[DeviceInfo]:
        return [DEVICE]

    def open(self, index: int, config: OpenConfig) -> None:
        self.device = torch.device("cpu")
        self.capabilities = Capabilities()

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        return self._verdict(op) or Verdict.composite()

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        raise AssertionError(f"a bare backend binds nothing, asked for {op.describe()}")


def make_binder(backend: Backend | None = None, tripwire: Tripwire | None = None) -> Binder:
    """A binder on an opened backend."""
    backend = backend or BareBackend()
    backend.open(0, OpenConfig())
    return Binder(backend, INFO, DEVICE, block_size=BLOCK_SIZE, tripwire=tripwire)


def load_model(
    folder: Path,
    *,
    dtype: DType = DType.FLOAT32,
    backend: Backend | None = None,
    tripwire: Tripwire | None = None,
    parallel: ParallelContext | None = None,
    **context: Any,
) -> CausalLM:
    """A model of a folder or a GGUF file, built and loaded."""
    with open_checkpoint(folder) as checkpoint:
        weights = ModelWeights(checkpoint)
        places = {} if parallel is None else {"parallel": parallel}
        ctx = BuildContext(binder=make_binder(backend, tripwire), dtype=dtype, weights=weights, **places, **context)
        model = build_model(checkpoint.config, ctx)
        model.load(weights)
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


@dataclass
class Request:
    """One request in the rig."""

    tokens: list[int]
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class Rig:
    """Feeds chunks of several sequences to a model and gives back the logits of every token.

    Blocks are handed out in random order, unowned memory and the null block hold NaN, and blocks that fell out of a
    window are replaced by the null block: a model that reads what it must not read says NaN.

    Args:
        model: Loaded.
        num_blocks: Blocks of each layer, the null block included.
        tripwire: Active around `forward`.
    """

    def __init__(
        self, model: CausalLM, *, num_blocks: int = 200, tripwire: Tripwire | None = None, seed: int = 0
    ) -> None:
        self.model = model
        self.tripwire = tripwire
        backend = BareBackend()
        specs = [spec for spec in model.spec.layers if spec is not None]
        self._groups: list[KVCacheSpec] = list(dict.fromkeys(specs))
        layouts = [backend.kv_layout(spec, BLOCK_SIZE) for spec in self._groups]
        self._specs = [GroupSpec(index=i, layout=layout) for i, layout in enumerate(layouts)]
        self._group_of = [self._groups.index(spec) for spec in specs]
        self._caches = [self._slab(layouts[group], num_blocks).views() for group in self._group_of]
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)

    @staticmethod
    def _slab(layout: Any, num_blocks: int) -> KVSlab:
        memory = torch.full((num_blocks * layout.block_bytes,), 0xFF, dtype=torch.uint8)
        return KVSlab(tensor=memory, layout=layout, num_blocks=num_blocks)

    def start(self, tokens: Sequence[int]) -> Request:
        """A new sequence."""
        return Request(list(tokens), blocks=[[] for _ in self._groups])

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Request, int]]) -> list[Tensor]:
        """Computes so many tokens of each sequence; logits [n, vocab_rows] for each."""
        work = sorted(work, key=lambda item: item[1])
        batch = self._batch(work)
        plans = [
            Plan(batch=batch, group=batch.groups[i], spec=spec, block_size=BLOCK_SIZE) for i, spec in self._indexed()
        ]
        hidden = self._forward(batch, [plans[group] for group in self._group_of])
        for sequence, count in work:
            sequence.num_computed += count
        return list(self.model.logits(hidden).split([count for _, count in work]))

    def run(self, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Logits of all tokens of one sequence, computed in those chunks."""
        sequence = self.start(tokens)
        assert sum(chunks) == len(tokens)
        return torch.cat([self.step([(sequence, count)])[0] for count in chunks])

    def _forward(self, batch: Batch, plans: list[Plan]) -> Tensor:
        self.model.prepare(batch)
        if self.tripwire is None:
            return self.model.forward(batch, plans, self._caches)
        with self.tripwire:
            return self.model.forward(batch, plans, self._caches)

    def _indexed(self) -> list[tuple[int, GroupSpec]]:
        return list(enumerate(self._specs))

    def _batch(self, work: Sequence[tuple[Request, int]]) -> Batch:
        starts, ids, positions = [0], [], []
        for sequence, count in work:
            begin, end = sequence.num_computed, sequence.num_computed + count
            ids += sequence.tokens[begin:end]
            positions += range(begin, end)
            starts.append(starts[-1] + count)
        return Batch(
            num_reqs=len(work),
            num_tokens=starts[-1],
            num_decodes=sum(count == 1 for _, count in work),
            max_query_len=max(count for _, count in work),
            token_ids=_int32(ids),
            positions=_int32(positions),
            query_start_loc=_int32(starts),
            query_start_loc_host=starts,
            num_valid_tokens=_int32([starts[-1]]),
            groups=tuple(self._group(index, work) for index in range(len(self._groups))),
            logits_indices=_int32([end - 1 for end in starts[1:]]),
        )

    def _group(self, index: int, work: Sequence[tuple[Request, int]]) -> GroupBatch:
        lens = [sequence.num_computed + count for sequence, count in work]
        width = max(-(-length // BLOCK_SIZE) for length in lens)
        table, slots = [], []
        for (sequence, _), length in zip(work, lens, strict=True):
            blocks = sequence.blocks[index]
            while len(blocks) * BLOCK_SIZE < length:
                blocks.append(self._free.pop())
            slots += [
                blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(sequence.num_computed, length)
            ]
            table.append(self._row(index, sequence, width))
        return GroupBatch(block_table=_int32(table), slots=_int32(slots), seq_lens=_int32(lens), seq_lens_host=lens)

    def _row(self, index: int, sequence: Request, width: int) -> list[int]:
        window = self._groups[index].window
        first_key = max(0, sequence.num_computed - window + 1) if window else 0
        blocks = [0] * (first_key // BLOCK_SIZE) + sequence.blocks[index][first_key // BLOCK_SIZE :]
        return blocks + [0] * (width - len(blocks))


def _int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)

"""L1: which positions sparse attention reads: scores are whole numbers, so order and ties are exact in every type."""

from __future__ import annotations

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import IndexTopkArgs, IndexTopkOp
from core.spec import CacheKind, DType
from core_conformance.checks import check
from core_conformance.diagnosis import known
from core_conformance.operations.cache_memory import POISONS, latent_cache
from core_conformance.operations.paged import PagedCache
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_attention import lens_of
from core_conformance.suite.test_l1_dense import DTYPES

_KINDS = {**DTYPES, "kv-e4m3": DType.BFLOAT16}
_HEADS, _DIM = 4, 32


def _op(name: str, top_k: int) -> IndexTopkOp:
    dtype = _KINDS[name]
    kv_dtype = DType.FLOAT8_E4M3FN if name == "kv-e4m3" else dtype
    return IndexTopkOp(dtype=dtype, num_heads=_HEADS, head_dim=_DIM, top_k=top_k, kv_dtype=kv_dtype)


class _Step(PagedCache):
    """Queries, keys and weights of small whole numbers."""

    def __init__(self, subject: Subject, op: IndexTopkOp, query_lens: list[int], seq_lens: list[int]) -> None:
        spec = latent_cache(CacheKind.INDEX, op.head_dim, op.kv_dtype)
        super().__init__(subject, spec, (op,), query_lens, seq_lens)
        self.op = op
        for keys in self.keys:
            keys.copy_(self._whole(-2, 3, *keys.shape))
        self.query = self._whole(-2, 3, self.num_tokens, op.num_heads, op.head_dim).to(torch_dtype(op.dtype))
        self.weights = self._whole(-3, 4, self.num_tokens, op.num_heads)

    def _whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.draw).float()

    def run(self) -> Tensor:
        """The device's choice."""
        put = self.subject.put
        args = IndexTopkArgs(
            query=put(self.query), weights=put(self.weights), cache=self.filled_cache(), plan=self.plan()
        )
        out: Tensor = self.subject.bind(self.op)(args)
        return out

    def expected(self, *, lowest_first: bool = True, more_keys: int = 0, relu: bool = True) -> Tensor:
        """[tokens, top_k], int32, by sorting."""
        found = torch.full((self.num_tokens, self.op.top_k), -1, dtype=torch.int32)
        for token, (row, position) in enumerate(self.queries):
            keys = self.keys[row][: max(position + 1 + more_keys, 1), 0].double()
            products = self.query[token].double() @ keys.T
            products = products.clamp(min=0) if relu else products
            scores = (self.weights[token].double() @ products).tolist()
            side = 1 if lowest_first else -1
            order = sorted(range(len(scores)), key=lambda s: (-scores[s], side * s))[: self.op.top_k]
            found[token, : len(order)] = torch.tensor(order, dtype=torch.int32)
        return found


def _check(subject: Subject, step: _Step) -> None:
    suspects = known(
        {
            "ties: of equal scores the higher position comes first": step.expected(lowest_first=False).double(),
            "tail: the newest key of each query is left out": step.expected(more_keys=-1).double(),
            "mask: each query reads one key past its position": step.expected(more_keys=1).double(),
            "relu: negative products count": step.expected(relu=False).double(),
        }
    )
    for poison in POISONS:
        step.poison = poison
        what = f"(memory {poison}) positions"
        subject.equal(step.op, step.run(), step.expected(), what, places=step.places, suspects=suspects)


@check("L1/index_topk", [f"{batch}-{name}" for batch in ("decode", "prefill", "chunk", "mixed") for name in _KINDS])
def test_positions_in_falling_order_of_score(subject: Subject, variant: str) -> None:
    """Positions and their order, bit by bit, ties by position; -1 where a query has fewer keys than are asked for."""
    batch, name = variant.split("-", 1)
    op = _op(name, 11)
    subject.bind(op)
    _check(subject, _Step(subject, op, *lens_of(subject.block_size, batch)))


@check("L1/index_topk/wide", DTYPES)
def test_more_positions_than_a_block_has(subject: Subject, variant: DType) -> None:
    """More than a block of positions, and more than some requests have."""
    name = next(name for name, dtype in DTYPES.items() if dtype is variant)
    op = _op(name, subject.block_size + 3)
    subject.bind(op)
    size = subject.block_size
    _check(subject, _Step(subject, op, [1, 1, 3], [size + 2, 2 * size + 1, size + 3]))


@check("L1/index_topk/ties", DTYPES)
def test_equal_scores_go_by_position(subject: Subject, variant: DType) -> None:
    """All scores are equal, or zero because no product is positive: the lowest positions, in order."""
    name = next(name for name, dtype in DTYPES.items() if dtype is variant)
    op = _op(name, 5)
    subject.bind(op)
    for sign in (1.0, -1.0):
        step = _Step(subject, op, [1, 2], [subject.block_size + 1, 7])
        step.query.fill_(sign)
        for keys in step.keys:
            keys.fill_(1.0)
        step.weights.fill_(1.0)
        _check(subject, step)

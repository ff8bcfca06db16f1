"""Operations of which some rows or requests can be asked for: their bits show what a determinism class is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.backend import ops as o
from core.backend import torch_dtype
from core.backend.schemes import quantize_rows
from core.spec import DType
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_dense import rope_table
from core_conformance.suite.test_l1_linear import put_act, stored_weight

__all__ = ["ROWS", "ROW_CASES", "Case"]

ROWS = 11
"""Rows of every case; widths are odd, so that vector code has tails."""


@dataclass(frozen=True)
class Case:
    """One operation over units that do not know of each other.

    Args:
        op: dtype -> the operation.
        run: (subject, operation, numbers of units) -> their results on the host, in that order.
        lengths: Rows of the result that belong to each unit.
    """

    op: Callable[[DType], Any]
    run: Callable[[Subject, Any, Sequence[int]], Tensor]
    lengths: tuple[int, ...] = (1,) * ROWS


class _Draw:
    """The same random numbers whenever it is made.

    Args:
        op: Its dtype is that of the numbers.
        rows: Which rows are wanted of what is drawn a row.
    """

    def __init__(self, op: Any, rows: Sequence[int]) -> None:
        self.dice, self.dtype, self.chosen = torch.Generator().manual_seed(77), torch_dtype(op.dtype), list(rows)

    def rows(self, *shape: int) -> Tensor:
        """[chosen rows, *shape]."""
        return self.whole(ROWS, *shape)[self.chosen]

    def whole(self, *shape: int) -> Tensor:
        """What belongs to no row."""
        return torch.randn(*shape, generator=self.dice).to(self.dtype)

    def floats(self, *shape: int) -> Tensor:
        """float32 in [0, 1), a row."""
        return torch.rand(ROWS, *shape, generator=self.dice)[self.chosen]

    def ids(self, low: int, high: int, *shape: int) -> Tensor:
        """int32, a row."""
        return torch.randint(low, high, (ROWS, *shape), generator=self.dice, dtype=torch.int32)[self.chosen]


def _linear(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw = _Draw(op, rows)
    x, shape = draw.rows(op.in_features), (op.out_features, op.in_features)
    parts = {"weight": draw.whole(*shape)} if op.scheme == "none" else stored_weight(op.scheme, *shape, draw.dice)
    packed = subject.pack(parts, op.scheme, shape, op.dtype)
    act = x if packed.input_format is None else quantize_rows(x, packed.input_format)
    return subject.get(subject.bind(op)(o.LinearArgs(x=put_act(subject, act), weight=packed)))


def _embed(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw = _Draw(op, rows)
    ids, table = draw.ids(0, 20), draw.whole(20, op.dim)
    packed = subject.pack({"weight": table}, "none", table.shape, op.dtype, role="embedding")
    return subject.get(subject.bind(op)(o.EmbedArgs(token_ids=subject.put(ids), weight=packed)))


def _rms_norm(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    return subject.get(subject.bind(op)(o.RmsNormArgs(x=put(draw.rows(op.dim)), weight=put(draw.whole(op.dim)))))


def _reduce_norm(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    x, residual, weight = put(draw.rows(op.dim)), put(draw.rows(op.dim)), put(draw.whole(op.dim))
    out = subject.bind(op)(o.ReduceNormArgs(partial=x, residual=residual, weight=weight))
    return torch.cat([subject.get(part) for part in out], dim=-1)


def _act_mul(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    return subject.get(subject.bind(op)(o.ActMulArgs(x=subject.put(_Draw(op, rows).rows(2 * op.size)))))


def _rope(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    args = o.RopeArgs(
        query=put(draw.rows(op.num_heads, op.head_dim)),
        key=put(draw.rows(op.num_kv_heads, op.head_dim)),
        positions=put(draw.ids(0, 64)),
        cos_sin=put(rope_table(64, op.rotary_dim)),
    )
    return torch.cat([subject.get(part) for part in subject.bind(op)(args)], dim=1)


def _route(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    logits = _Draw(op, rows).floats(op.num_experts) * 4
    weights, ids = subject.bind(op)(o.RouteArgs(router_logits=subject.put(logits)))
    return torch.cat((subject.get(weights), subject.get(ids).float()), dim=-1)


def _experts(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    shapes = (2 * op.intermediate_size, op.hidden_size), (op.hidden_size, op.intermediate_size)
    weights = [draw.whole(op.num_experts, *shape) for shape in shapes]
    packed = [subject.pack({"weight": w}, "none", w.shape, op.dtype, role="experts") for w in weights]
    args = o.ExpertsArgs(
        x=put(draw.rows(op.hidden_size)),
        gate_up=packed[0],
        down=packed[1],
        weights=put(draw.floats(op.top_k)),
        expert_ids=put(draw.ids(0, op.num_experts, op.top_k)),
    )
    return subject.get(subject.bind(op)(args))


def _lora(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    there = put(draw.rows(op.out_features))
    args = o.LoraAddArgs(
        y=there,
        x=put(draw.rows(op.in_features)),
        a=put(draw.whole(op.num_adapters, op.rank, op.in_features)),
        b=put(draw.whole(op.num_adapters, op.out_features, op.rank)),
        adapter_ids=put(draw.ids(-1, op.num_adapters)),
    )
    subject.bind(op)(args)
    return subject.get(there)


def _merge(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    outs, lses = draw.rows(3, op.num_heads, op.v_head_dim), draw.floats(3, op.num_heads)
    out, lse = subject.bind(op)(o.MergeLseArgs(outs=put(outs.transpose(0, 1)), lses=put(lses.transpose(0, 1))))
    return torch.cat((subject.get(out).float(), subject.get(lse)[..., None]), dim=-1)


def _sample(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    args = o.SampleArgs(
        logits=put(draw.floats(op.vocab_size) * 6),
        temperature=put(torch.ones(len(draw.chosen))),
        seeds=put(draw.ids(0, 9999).long()),
        positions=put(draw.ids(0, 99)),
        top_p=put(torch.full((len(draw.chosen),), 0.9)),
    )
    return subject.get(subject.bind(op)(args))


def _rejection(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    args = o.RejectionSampleArgs(
        logits=put(draw.floats(op.num_spec_tokens + 1, op.vocab_size) * 6),
        draft_token_ids=put(draw.ids(0, op.vocab_size, op.num_spec_tokens)),
        num_draft_tokens=put(draw.ids(0, op.num_spec_tokens + 1)),
        temperature=put(torch.full((len(draw.chosen),), 2.0)),
        seeds=put(draw.ids(0, 9999).long()),
        positions=put(draw.ids(0, 99)),
    )
    tokens, valid = subject.bind(op)(args)
    return torch.cat((subject.get(tokens), subject.get(valid)[:, None]), dim=1)


def _bitmask(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    there = put(draw.floats(op.vocab_size))
    bits = draw.ids(-(2**31), 2**31 - 1, -(-op.vocab_size // 32))
    subject.bind(op)(o.ApplyTokenBitmaskArgs(logits=there, bitmask=put(bits)))
    return subject.get(there)


def _advance(subject: Subject, op: Any, rows: Sequence[int]) -> Tensor:
    draw, put = _Draw(op, rows), subject.put
    state = [put(draw.ids(0, 9)) for _ in range(4)]
    args = o.AdvanceArgs(
        token_ids=state[0],
        positions=state[1],
        seq_lens=state[2],
        slots=(state[3],),
        block_tables=(put(draw.ids(1, 9, 4)),),
        sampled=put(draw.ids(0, 99, 1)),
        num_accepted=put(draw.ids(0, 2)),
    )
    subject.bind(op)(args)
    return torch.stack([subject.get(part) for part in state], dim=1)


def _any(make: Callable[..., Any], **fields: Any) -> Callable[[DType], Any]:
    return lambda dtype: make(dtype=dtype, **fields)


def _linear_op(scheme: str = "none") -> Callable[[DType], Any]:
    def make(dtype: DType) -> Any:
        width = 71 if scheme == "none" else 256
        return o.LinearOp(
            dtype=dtype, weight_dtype=dtype, out_dtype=dtype, in_features=width, out_features=33, scheme=scheme
        )

    return make


def _float32(make: Callable[..., Any], **fields: Any) -> Callable[[DType], Any]:
    """For operations on logits, whatever the model's type is."""
    return lambda dtype: make(dtype=DType.FLOAT32, **fields)


ROW_CASES: dict[str, Case] = {
    "linear": Case(_linear_op(), _linear),
    "linear-int8": Case(_linear_op("int8"), _linear),
    "linear-fp8_channel": Case(_linear_op("fp8_channel"), _linear),
    "linear-q4_0": Case(_linear_op("q4_0"), _linear),
    "linear-q6_k": Case(_linear_op("q6_k"), _linear),
    "embed": Case(_any(o.EmbedOp, dim=37), _embed),
    "rms_norm": Case(_any(o.RmsNormOp, dim=53, eps=1e-6), _rms_norm),
    "reduce_norm": Case(_any(o.ReduceNormOp, dim=53, eps=1e-6), _reduce_norm),
    "act_mul": Case(_any(o.ActMulOp, size=37), _act_mul),
    "act_mul-gelu": Case(_any(o.ActMulOp, size=37, activation="gelu_tanh"), _act_mul),
    "rope": Case(_any(o.RopeOp, num_heads=3, num_kv_heads=1, head_dim=34, rotary_dim=34), _rope),
    "route": Case(_any(o.RouteOp, num_experts=19, top_k=5), _route),
    "experts": Case(_any(o.ExpertsOp, num_experts=3, hidden_size=23, intermediate_size=29, top_k=2), _experts),
    "lora_add_": Case(_any(o.LoraAddOp, in_features=31, out_features=17, rank=3, num_adapters=2), _lora),
    "merge_lse": Case(_any(o.MergeLseOp, num_heads=5, v_head_dim=7), _merge),
    "sample": Case(_float32(o.SampleOp, vocab_size=101, features=frozenset({"top_p"})), _sample),
    "rejection_sample": Case(_float32(o.RejectionSampleOp, vocab_size=33, num_spec_tokens=2), _rejection),
    "apply_token_bitmask": Case(_float32(o.ApplyTokenBitmaskOp, vocab_size=101), _bitmask),
    "advance": Case(_float32(o.AdvanceOp, block_sizes=(4,)), _advance),
}
"""Operations whose rows are independent."""

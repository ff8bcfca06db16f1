"""Operations over requests: some of them can be asked for, or one of them in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import AttentionOp, IndexTopkArgs, IndexTopkOp, MlaOp
from core.spec import CacheKind, DType
from core_conformance.operations.cache_memory import latent_cache
from core_conformance.operations.determinism_ops import Case
from core_conformance.operations.latent import LatentStep
from core_conformance.operations.paged import PagedCache, PagedStep
from core_conformance.operations.recurrent import Lane, Layer, StateStep
from core_conformance.operations.recurrent_layers import conv1d, gated_delta, ssd
from core_conformance.subject import Subject

__all__ = ["CHUNKED", "REQUEST_CASES"]

_QUERY, _SEQ = (1, 1, 1, 3, 6, 21), (3, 17, 40, 9, 22, 21)
"""Tokens and keys of the requests; the last is a whole prompt, which is also what is cut into chunks."""
_CHUNKS = (5, 1, 15)
_STARTS = tuple(sum(_QUERY[:row]) for row in range(len(_QUERY)))

Part = tuple[int, int, int]
"""(request, its first token in the step, past its last)."""


def _whole(rows: Sequence[int]) -> list[Part]:
    return [(row, 0, _QUERY[row]) for row in rows]


def _keys_of(parts: Sequence[Part]) -> tuple[list[int], list[int]]:
    """(query_lens, seq_lens)."""
    return [end - begin for _, begin, end in parts], [_SEQ[row] - _QUERY[row] + end for row, _, end in parts]


def _cut(x: Tensor, parts: Sequence[Part]) -> Tensor:
    return torch.cat([x[_STARTS[row] + begin : _STARTS[row] + end] for row, begin, end in parts])


def _share(step: PagedCache, whole: PagedCache, parts: Sequence[Part]) -> None:
    """Gives a step the contents of the whole."""
    for name in ("keys", "values"):
        stored = getattr(whole, name)
        setattr(step, name, [stored[row][:length] for (row, _, _), length in zip(parts, step.seq_lens, strict=True)])


def _attention(subject: Subject, op: Any, parts: Sequence[Part]) -> Tensor:
    whole, step = PagedStep(subject, op, _QUERY, _SEQ), PagedStep(subject, op, *_keys_of(parts), seed=len(parts))
    _share(step, whole, parts)
    step.query = _cut(whole.query, parts)
    return subject.get(step.run())


def _mla(subject: Subject, op: Any, parts: Sequence[Part]) -> Tensor:
    whole, step = LatentStep(subject, op, _QUERY, _SEQ), LatentStep(subject, op, *_keys_of(parts), seed=len(parts))
    _share(step, whole, parts)
    step.q_latent, step.q_rope = _cut(whole.q_latent, parts), _cut(whole.q_rope, parts)
    return subject.get(step.run())


def _index(subject: Subject, op: Any, parts: Sequence[Part]) -> Tensor:
    spec = latent_cache(CacheKind.INDEX, op.head_dim, op.kv_dtype)
    whole = PagedCache(subject, spec, (op,), _QUERY, _SEQ)
    step = PagedCache(subject, spec, (op,), *_keys_of(parts), seed=len(parts))
    _share(step, whole, parts)
    dice = torch.Generator().manual_seed(3)
    query = torch.randn(sum(_QUERY), op.num_heads, op.head_dim, generator=dice).to(whole.keys[0].dtype)
    weights, put = torch.randn(sum(_QUERY), op.num_heads, generator=dice), subject.put
    args = IndexTopkArgs(
        query=put(_cut(query, parts)), weights=put(_cut(weights, parts)), cache=step.filled_cache(), plan=step.plan()
    )
    return subject.get(subject.bind(op)(args))


def _recurrent(make: Callable[[DType], Layer]) -> Callable[[Subject, Any, Sequence[Part]], Tensor]:
    def run(subject: Subject, op: Any, parts: Sequence[Part]) -> Tensor:
        layer = dataclasses.replace(make(op.dtype), op=op)
        whole = StateStep(subject, layer, [Lane(tokens=count, slots=(row + 2,)) for row, count in enumerate(_QUERY)])
        lanes = [Lane(tokens=end - begin, slots=(row + 2,)) for row, begin, end in parts]
        step = StateStep(subject, layer, lanes)
        step.states = whole.states
        pieces = [layer.tokens(whole.inputs, slice(_STARTS[r] + a, _STARTS[r] + b)) for r, a, b in parts]
        step.inputs = {
            name: torch.cat([piece[name] for piece in pieces]) if name in layer.per_token else x
            for name, x in whole.inputs.items()
        }
        return subject.get(step.run(step.plane("nan")))

    return run


def _attention_op(**changes: Any) -> Callable[[DType], Any]:
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "scale": 0.125}
    return lambda dtype: AttentionOp(dtype=dtype, kv_dtype=dtype, **(fields | changes))


def _mla_op(dtype: DType) -> Any:
    return MlaOp(dtype=dtype, kv_dtype=dtype, num_heads=3, latent_dim=64, rope_dim=16, scale=0.125)


def _index_op(dtype: DType) -> Any:
    return IndexTopkOp(dtype=dtype, kv_dtype=dtype, num_heads=3, head_dim=32, top_k=7)


def _layer_op(make: Callable[[DType], Layer]) -> Callable[[DType], Any]:
    return lambda dtype: make(dtype).op


_LAYERS: dict[str, Callable[[DType], Layer]] = {"conv1d": conv1d, "gated_delta": gated_delta, "ssd": ssd}
_RUNS: dict[str, tuple[Callable[[DType], Any], Callable[[Subject, Any, Sequence[Part]], Tensor]]] = {
    "attention": (_attention_op(), _attention),
    "attention-rounded": (_attention_op(quantize_activations=True), _attention),
    "attention-window": (_attention_op(window=7), _attention),
    "mla": (_mla_op, _mla),
    "index_topk": (_index_op, _index),
    **{name: (_layer_op(make), _recurrent(make)) for name, make in _LAYERS.items()},
}


def _request_case(name: str) -> Case:
    op, run = _RUNS[name]
    return Case(op, lambda subject, op, rows: run(subject, op, _whole(rows)), lengths=_QUERY)


def _chunk_case(name: str) -> Callable[[Subject, Any], tuple[Tensor, Tensor]]:
    _, run = _RUNS[name]

    def both(subject: Subject, op: Any) -> tuple[Tensor, Tensor]:
        last = len(_QUERY) - 1
        ends = [sum(_CHUNKS[: i + 1]) for i in range(len(_CHUNKS))]
        chunks = [run(subject, op, [(last, end - count, end)]) for count, end in zip(_CHUNKS, ends, strict=True)]
        return run(subject, op, [(last, 0, _QUERY[last])]), torch.cat(chunks)

    return both


REQUEST_CASES: dict[str, Case] = {name: _request_case(name) for name in _RUNS}
"""Operations whose requests are independent; a result has a row for each token."""

CHUNKED: dict[str, tuple[Callable[[DType], Any], Callable[[Subject, Any], tuple[Tensor, Tensor]]]] = {
    name: (_RUNS[name][0], _chunk_case(name)) for name in _RUNS if name not in _LAYERS
}
"""Operations to (dtype -> operation; a prompt in one step, and in chunks)."""

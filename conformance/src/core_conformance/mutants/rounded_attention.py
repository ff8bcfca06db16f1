"""Attention in the format "int16_row", as its roundings are declared, and with one bug each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from core.backend import Kind, Verdict
from core.backend.ops import AttentionArgs, AttentionOp, Determinism, OpSpec
from core.backend.reference.cache import Span, owned_keys, spans
from core.spec import DeviceInfo, DType
from core_conformance.mutants.backend import Maker, MutantBackend
from core_conformance.mutants.variant import Honest, Mutant
from core_conformance.subject import oracle

__all__ = ["HONEST", "MUTANTS"]

_CHECK, _CHUNKS = "L1/attention/rounded", "L1/determinism/chunks-attention-rounded"


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How the kernel rounds.

    Args:
        query_top: Integer of a query's largest magnitude.
        key_top: The same of a key.
        value_top: The same of a value.
        weight_top: The same of a chunk's probabilities times their values' scales.
        counted_as: What the integers of queries and keys are divided by again, of what they were multiplied with; 1.
        chunk: Keys whose probabilities share a scale.
        one_query_scale: Whether all queries of a request have the largest one's scale.
        one_key_scale: The same of keys.
        one_value_scale: The same of values.
        integer: Rounds.
        least_queries: Requests with fewer queries in the step are left as they are.
    """

    query_top: float = 2047.0
    key_top: float = 2047.0
    value_top: float = 2047.0
    weight_top: float = 8191.0
    counted_as: float = 1.0
    chunk: int = 128
    one_query_scale: bool = False
    one_key_scale: bool = False
    one_value_scale: bool = False
    integer: Callable[[Tensor], Tensor] = torch.round
    least_queries: int = 1


_EXACT = _Form(integer=lambda x: x)


def _rounding(form: _Form) -> Maker:
    """The kernel where rounding is allowed; the reference for the rest, query by query as D3 wants it."""

    def make(op: AttentionOp) -> Callable[[Any], Any]:
        if not _rounds(op):
            return oracle(dataclasses.replace(op, determinism=Determinism.D3))

        def attention(args: AttentionArgs) -> Tensor:
            out = args.query.new_zeros((*args.query.shape[:2], op.v_head_dim))
            for span in spans(args.plan):
                pays = span.end - span.start >= form.least_queries
                mixed, lse = _attend(op, args, span, form if pays else _EXACT)
                out[span.start : span.end] = mixed.to(out.dtype)
                if args.lse is not None:
                    args.lse[span.start : span.end] = lse.float()
            return out

        return attention

    return make


def _rounds(op: OpSpec) -> bool:
    known = isinstance(op, AttentionOp) and op.dtype is op.kv_dtype is DType.BFLOAT16 and op.causal
    return known and getattr(op, "quantize_activations", False) and op.features <= {"lse", "sinks"}


def _attend(op: AttentionOp, args: AttentionArgs, span: Span, form: _Form) -> tuple[Tensor, Tensor]:
    """[n, num_heads, v_head_dim] and the log-sum-exp [n, num_heads] of the request's n queries; sums are exact."""
    assert args.cache is not None
    (key, owned), (value, _) = (owned_keys(plane, args.plan, span) for plane in args.cache)
    repeat = op.num_heads // op.num_kv_heads
    key, value = (x.double().transpose(0, 1).repeat_interleave(repeat, dim=0) for x in (key, value))
    query = args.query[span.start : span.end].double().transpose(0, 1)
    queries, query_scale = _integers(query, form.query_top, form, form.one_query_scale)
    keys, key_scale = _integers(key, form.key_top, form, form.one_key_scale)
    values, value_scale = _integers(value, form.value_top, form, form.one_value_scale)
    logits = (queries @ keys.mT) * query_scale * key_scale.mT * (op.scale * form.counted_as)
    if op.softcap:
        logits = op.softcap * torch.tanh(logits / op.softcap)
    at, position = torch.arange(span.seq_len), torch.arange(span.first_position, span.seq_len)[:, None]
    seen = owned[: span.seq_len] & (at <= position)
    if op.window:
        seen = seen & (at > position - op.window)
    logits = torch.where(seen, logits, -math.inf)
    lse = logits.logsumexp(-1)
    if args.sinks is not None:
        lse = torch.logaddexp(lse, args.sinks.double()[:, None])
    weights = torch.exp(logits - lse[..., None]) * value_scale.mT
    mixed = torch.zeros(*query.shape[:2], op.v_head_dim, dtype=torch.float64)
    for begin in range(0, span.seq_len, form.chunk):
        part = weights[..., begin : begin + form.chunk]
        whole, scale = _integers(part, form.weight_top, form, False)
        mixed += (whole @ values[:, begin : begin + form.chunk]) * scale
    return mixed.transpose(0, 1), lse.transpose(0, 1)


def _integers(rows: Tensor, top: float, form: _Form, shared: bool) -> tuple[Tensor, Tensor]:
    """Rows [heads, n, k] as integers, and their scales [heads, n, 1]."""
    largest = rows.abs().amax(-1, keepdim=True)
    if shared:
        largest = largest.amax(1, keepdim=True).expand_as(largest)
    scale = torch.where(largest > 0, largest / top, 1.0)
    return form.integer(rows / scale), scale


class _Rounding(MutantBackend):
    """Declares the format where it rounds, and only there."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        verdict = super().supports(op, device)
        if verdict.kind is not Kind.NATIVE or not self._declares(op):
            return verdict
        return dataclasses.replace(verdict, activation_format="int16_row")

    def _declares(self, op: OpSpec) -> bool:
        return _rounds(op)


class InSixteenBits(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form())}

    def __init__(self) -> None:
        super().__init__(determinism=Determinism.D3)


class InFinerIntegers(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {
        "attention": _rounding(_Form(query_top=5791.0, key_top=5791.0, weight_top=16383.0, chunk=48))
    }


class QueriesInEightBits(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(query_top=127.0))}


class KeysInEightBits(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(key_top=127.0))}


class ValuesInEightBits(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(value_top=127.0))}


class WeightsInEightBits(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(weight_top=127.0))}


class CutOff(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(integer=torch.trunc))}


class CountedAs2048(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(counted_as=2047 / 2048))}


class OneQueryScale(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(one_query_scale=True))}


class OneKeyScale(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(one_key_scale=True))}


class OneValueScale(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(one_value_scale=True))}


class OneWeightScale(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(chunk=1 << 20))}


class LongRequestsAlone(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form(least_queries=12))}

    def __init__(self) -> None:
        super().__init__(determinism=Determinism.D3)


class Undeclared(MutantBackend):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form())}


class DeclaredEverywhere(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"attention": _rounding(_Form())}

    def _declares(self, op: OpSpec) -> bool:
        return isinstance(op, AttentionOp)


def _mutant(name: str, backend: type[MutantBackend]) -> Mutant:
    return Mutant(name=name, level="L1", first=_CHECK, also=(_CHECK,), backend=backend)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("attention's queries in 8 bits, declared as 16", QueriesInEightBits),
    _mutant("attention's keys in 8 bits, declared as 16", KeysInEightBits),
    _mutant("attention's values in 8 bits, declared as 16", ValuesInEightBits),
    _mutant("attention's probabilities in 8 bits, declared as 16", WeightsInEightBits),
    _mutant("rounded attention cut off", CutOff),
    _mutant("rounded attention scaled by 2,048", CountedAs2048),
    _mutant("one scale for a request's queries", OneQueryScale),
    _mutant("one scale for a request's keys", OneKeyScale),
    _mutant("one scale for a request's values", OneValueScale),
    _mutant("one scale for a query's probabilities", OneWeightScale),
    Mutant(
        name="long requests alone are rounded, declared D3",
        level="L1",
        first=_CHUNKS,
        also=(_CHECK, _CHUNKS),
        backend=LongRequestsAlone,
    ),
    _mutant("attention rounded and not declared", Undeclared),
    _mutant("rounded attention declared where nobody allowed it", DeclaredEverywhere),
)

HONEST: tuple[Honest, ...] = (
    Honest(
        name="attention in 16 bits, declared D3",
        backend=InSixteenBits,
        heads=("L1/attention", "L1/determinism/chunks-att"),
    ),
    Honest(name="attention in 16 bits, finer and in small chunks", backend=InFinerIntegers, heads=("L1/attention",)),
)

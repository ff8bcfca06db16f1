"""Kernels of the backend beside torch, and FlashInfer where it is installed, as a share of what the device can do."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from stopwatch import best_seconds
from torch import Tensor
from torch.nn import functional

from core.backend.ops import (
    ActMulArgs,
    ActMulOp,
    AttentionArgs,
    AttentionOp,
    LinearArgs,
    LinearOp,
    OpSpec,
    RmsNormArgs,
    RmsNormOp,
    SampleArgs,
    SampleOp,
)
from core.errors import CoreError
from core.spec import DType
from core_conformance.operations.paged import PagedStep
from core_conformance.subject import Subject
from core_triton.roofline import Chip, Sizes, expected

__all__ = ["measure_kernels"]

_BF16 = DType.BFLOAT16


@dataclass(frozen=True)
class _Case:
    """One operation: how the backend, torch and others do it."""

    name: str
    op: OpSpec
    sizes: Sizes
    ours: Callable[[], object]
    others: dict[str, Callable[[], object]]


def measure_kernels(subject: Subject, chip: Chip, *, quick: bool) -> list[dict[str, Any]]:
    """One entry a case: microseconds by who, and the backend's share of the roofline.

    Args:
        subject: The opened backend.
        chip: Bandwidth and rates as they were measured in this run.
        quick: Small sizes, once each.
    """

    def wait() -> None:
        subject.backend.fence().wait()

    found = []
    for make in (_rms_norm, _act_mul, _linear, _attention, _sample):
        try:
            cases = list(make(subject, quick))
        except (CoreError, RuntimeError) as error:
            found.append({"case": make.__name__.strip("_"), "failed": _line(error)})
            continue
        found += [_measured(case, wait, chip, 1 if quick else 5) for case in cases]
    return found


def _measured(case: _Case, wait: Callable[[], None], chip: Chip, repeats: int) -> dict[str, Any]:
    limit = expected(case.op, case.sizes, chip)
    entry: dict[str, Any] = {"case": case.name, "spec": case.op.to_dict(), "bound": limit.bound, "us": {}}
    entry["expected_us"] = round(limit.seconds * 1e6, 3)
    for name, work in {"ours": case.ours, **case.others}.items():
        try:
            entry["us"][name] = round(best_seconds(work, wait, repeats=repeats) * 1e6, 3)
        except Exception as error:
            entry.setdefault("failed_by", {})[name] = _line(error)
    if "ours" in entry["us"]:
        entry["share"] = float(f"{limit.share(entry['us']['ours'] * 1e-6):.4g}")
    return entry


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _random(subject: Subject, *shape: int) -> Tensor:
    return subject.put(torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16())


def _bind(subject: Subject, op: OpSpec) -> Callable[[Any], Any]:
    """As the core binds it, without the suite's watch over read-only tensors."""
    return subject.binder.bind(op)


def _rms_norm(subject: Subject, quick: bool) -> Iterator[_Case]:
    rows, dim = (4, 64) if quick else (64, 4096)
    op = RmsNormOp(dtype=_BF16, dim=dim, eps=1e-6)
    x, weight, run = _random(subject, rows, dim), _random(subject, dim), _bind(subject, op)
    others: dict[str, Callable[[], object]] = {"torch": lambda: functional.rms_norm(x, (dim,), weight, 1e-6)}
    if (flashinfer := _flashinfer()) is not None:
        others["flashinfer"] = lambda: flashinfer.norm.rmsnorm(x, weight, 1e-6)
    args = RmsNormArgs(x=x, weight=weight)
    yield _Case(f"rms_norm {rows}x{dim}", op, Sizes(tokens=rows), partial(run, args), others)


def _act_mul(subject: Subject, quick: bool) -> Iterator[_Case]:
    rows, size = (4, 64) if quick else (64, 14336)
    op = ActMulOp(dtype=_BF16, size=size)
    x, run = _random(subject, rows, 2 * size), _bind(subject, op)
    others = {"torch": lambda: functional.silu(x[:, :size]) * x[:, size:]}
    yield _Case(f"act_mul {rows}x{size}", op, Sizes(tokens=rows), partial(run, ActMulArgs(x=x)), others)


def _linear(subject: Subject, quick: bool) -> Iterator[_Case]:
    inputs, outputs = (64, 96) if quick else (4096, 14336)
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    dense = subject.put(weight)
    op = LinearOp(dtype=_BF16, in_features=inputs, out_features=outputs)
    packed, run = subject.pack({"weight": weight}, "none", (outputs, inputs), _BF16), _bind(subject, op)
    for rows in (1, 16) if quick else (1, 64, 4096):
        x = _random(subject, rows, inputs)
        ours = partial(run, LinearArgs(x=x, weight=packed))
        name = f"linear {rows}x{inputs}x{outputs}"
        yield _Case(name, op, Sizes(tokens=rows), ours, {"torch": partial(functional.linear, x, dense)})


def _attention(subject: Subject, quick: bool) -> Iterator[_Case]:
    heads, kv_heads, dim = (4, 2, 64) if quick else (32, 8, 128)
    op = AttentionOp(
        dtype=_BF16,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        kv_dtype=_BF16,
        scale=dim**-0.5,
    )
    run = _bind(subject, op)
    # No step is larger than what the device was opened for.
    requests, context = (2, 40) if quick else (32, 1000)
    for name, queries, lens in (("decode", [1] * requests, [context] * requests), ("prefill", [context], [context])):
        step = PagedStep(subject, op, queries, lens)
        query = subject.put(step.query)
        args = AttentionArgs(query=query, cache=step.filled_cache(), plan=step.plan())
        keys, values = ([subject.put(x).transpose(0, 1) for x in plane] for plane in (step.keys, step.values))
        sizes = Sizes(tokens=sum(queries), requests=len(queries), context=context)
        label = f"attention {name}, {len(queries)} requests of {context}"
        yield _Case(label, op, sizes, partial(run, args), _attention_others(query, keys, values, queries))


def _attention_others(
    query: Tensor, keys: list[Tensor], values: list[Tensor], queries: list[int]
) -> dict[str, Callable[[], object]]:
    k, v, count = torch.stack(keys), torch.stack(values), queries[0]
    q = query.view(len(queries), count, *query.shape[1:]).transpose(1, 2)
    causal = count > 1
    others: dict[str, Callable[[], object]] = {
        "torch": lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    }
    if (flashinfer := _flashinfer()) is not None and causal:
        plain = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        others["flashinfer"] = lambda: flashinfer.single_prefill_with_kv_cache(*plain, causal=True)
    elif flashinfer is not None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=query.device), "NHD"
        )
        requests, kv_heads, length, dim = k.shape
        pages = torch.arange(requests, dtype=torch.int32, device=query.device)
        starts = torch.arange(requests + 1, dtype=torch.int32, device=query.device)
        # Each request's keys are one page: the layout that costs its kernel least.
        cache = torch.stack([k.transpose(1, 2), v.transpose(1, 2)], dim=1).contiguous()
        last = torch.full((requests,), length, dtype=torch.int32, device=query.device)
        wrapper.plan(starts, pages, last, query.shape[1], kv_heads, dim, length, data_type=query.dtype)
        others["flashinfer"] = lambda: wrapper.run(query, cache)
    return others


def _sample(subject: Subject, quick: bool) -> Iterator[_Case]:
    rows, vocab = (2, 1000) if quick else (32, 128256)
    op = SampleOp(dtype=DType.FLOAT32, vocab_size=vocab, features=frozenset({"top_p"}))
    logits = subject.put(torch.randn(rows, vocab))
    args = SampleArgs(
        logits=logits.clone(),
        temperature=subject.put(torch.ones(rows)),
        seeds=subject.put(torch.arange(rows)),
        positions=subject.put(torch.arange(rows).int()),
        top_p=subject.put(torch.full((rows,), 0.9)),
    )
    others = {"torch": lambda: torch.multinomial(_top_p(logits, 0.9), 1)}
    sizes = Sizes(tokens=rows, requests=rows)
    yield _Case(f"sample top_p {rows}x{vocab}", op, sizes, partial(_bind(subject, op), args), others)


def _top_p(logits: Tensor, top_p: float) -> Tensor:
    probabilities, order = logits.softmax(-1).sort(-1, descending=True)
    kept = probabilities.cumsum(-1) - probabilities < top_p
    return torch.zeros_like(logits).scatter(-1, order, probabilities * kept)


def _flashinfer() -> Any:
    if not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None:
        return None
    return importlib.import_module("flashinfer")

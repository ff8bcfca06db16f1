"""Bugs planted behind and before the calls: a check that passes on the honest code must fail on each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from checks import CHECKS

from core_conformance.subject import Subject


@contextmanager
def numerics(operator: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Puts other numerics behind an operator, made of the honest ones."""
    from core_ascend.simulation.calls import NUMERICS

    honest = NUMERICS[operator]
    NUMERICS[operator] = make(honest)
    try:
        yield
    finally:
        NUMERICS[operator] = honest


@contextmanager
def patched(module: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces a function or a number of the backend by one made of it."""
    import importlib

    place = importlib.import_module(module)
    honest = getattr(place, name)
    setattr(place, name, make(honest))
    try:
        yield
    finally:
        setattr(place, name, honest)


def changed(**how: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Calls the honest numerics with arguments that were changed on the way."""

    def make(honest: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            # The dispatcher hands over by position what may come so.
            bound = inspect.signature(honest).bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                if name in how and value is not None:
                    bound.arguments[name] = how[name](value)
            return honest(*bound.args, **bound.kwargs)

        return run

    return make


def wrong_heads(honest: Callable[..., Any]) -> Callable[..., Any]:
    """Query head h reads key head h % key heads."""

    def run(query: Any, key: Any, value: Any, scale: float, seen: Any, sink: Any = None) -> Any:
        repeat = query.shape[1] // key.shape[1]
        order = torch.arange(query.shape[1]).view(-1, key.shape[1]).T.flatten()
        out, lse = honest(query[:, order.argsort()] if repeat > 1 else query, key, value, scale, seen, sink)
        return (out[:, order], lse[:, order]) if repeat > 1 else (out, lse)

    return run


def no_rescale(honest: Callable[..., Any]) -> Callable[..., Any]:
    """Weights are not divided by their sum."""

    def run(query: Any, key: Any, value: Any, scale: float, seen: Any, sink: Any = None) -> Any:
        out, lse = honest(query, key, value, scale, seen, sink)
        return out * torch.exp(lse).clamp(max=1e4)[..., None], lse

    return run


FIA = "npu::npu_fused_infer_attention_score"
SIM_ATTENTION = "core_ascend.simulation.attention"
MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "attention: no rescale": ("attention", lambda: patched(SIM_ATTENTION, "attend", no_rescale)),
    "attention: scale dropped": ("attention", lambda: numerics(FIA, changed(scale=lambda _: 1.0))),
    "attention: wrong head map": ("attention", lambda: patched(SIM_ATTENTION, "attend", wrong_heads)),
    "attention: lengths one short": (
        "attention",
        lambda: numerics(FIA, changed(actual_seq_lengths_kv=lambda lens: [max(1, n - 1) for n in lens])),
    ),
    "attention: window one short": ("attention-window", lambda: numerics(FIA, changed(pre_tokens=lambda n: n - 1))),
    "attention: window one long": ("attention-window", lambda: numerics(FIA, changed(pre_tokens=lambda n: n + 1))),
    "attention: sinks forgotten": (
        "attention-sinks",
        lambda: numerics(f"{FIA}_v2", changed(learnable_sink=lambda s: s * 0 - 30)),
    ),
    "attention: padding is not silenced": (
        "attention-padding",
        lambda: patched("core_ascend.ops.attention", "_finished", lambda f: lambda a, p, o, s: o),
    ),
    "write: slots one further": (
        "attention",
        lambda: numerics(
            "npu::npu_scatter_pa_kv_cache",
            lambda honest: lambda k, v, kc, vc, slots, **kw: honest(k, v, kc, vc, (slots + 1).clamp(max=255), **kw),
        ),
    ),
    "write: slots of another type": (
        "attention",
        lambda: patched(
            "core_ascend.ops.cache",
            "write",
            lambda _: lambda store, plan, new, cache, fractal=False: store(*new, *cache, plan.targets.float()),
        ),
    ),
    "write: keys and values swapped": (
        "attention",
        lambda: numerics(
            "npu::npu_scatter_pa_kv_cache",
            lambda honest: lambda k, v, kc, vc, slots, **kw: honest(v, k, kc, vc, slots, **kw),
        ),
    ),
    "latent: rotated part forgotten": ("latent", lambda: numerics(f"{FIA}_v2", changed(query_rope=torch.zeros_like))),
    "latent: pieces see the whole request": (
        "latent",
        lambda: patched(
            "core_ascend.plan", "_cut_pieces", lambda f: lambda plan, s, c: (f(plan, s, c), _whole_requests(plan))
        ),
    ),
    "latent: sparse reads every key": (
        "latent-sparse",
        lambda: numerics(
            "npu::npu_sparse_flash_attention",
            lambda honest: (
                lambda q, k, v, idx, scale, **kw: honest(
                    q, k, v, torch.arange(idx.shape[2], dtype=torch.int32).expand_as(idx).contiguous(), scale, **kw
                )
            ),
        ),
    ),
    "index: weights forgotten": (
        "index",
        lambda: numerics(
            "npu::npu_lightning_indexer", lambda honest: lambda q, k, w, **kw: honest(q, k, torch.ones_like(w), **kw)
        ),
    ),
    "linear: row scales dropped": (
        "linear-int8",
        lambda: numerics("npu::npu_quant_matmul", changed(pertoken_scale=torch.ones_like)),
    ),
    "linear: the second part of a wide weight is the first": (
        "linear-int8-wide",
        lambda: patched(
            "core_ascend.weights",
            "AscendPacked",
            lambda c: type("Twice", (c,), {"parts": lambda s: _first_twice(c, s)}),
        ),
    ),
    "norm: gemma without its one": (
        "norm-gemma",
        lambda: numerics(
            "npu::npu_gemma_rms_norm", lambda honest: lambda x, g, epsilon=1e-6: honest(x, g - 1.0, epsilon)
        ),
    ),
    "norm: epsilon dropped": (
        "norm",
        lambda: numerics("npu::npu_add_rms_norm", lambda honest: lambda a, b, g, epsilon=0.0: honest(a, b, g, 0.0)),
    ),
    "rope: halves for pairs": (
        "rope-interleaved",
        lambda: numerics("npu::npu_rotary_mul", changed(rotary_mode=lambda _: "half")),
    ),
    "route: groups by their best, not their two best": (
        "route-groups",
        lambda: numerics("npu::npu_moe_gating_top_k", changed(group_select_mode=lambda _: 0)),
    ),
    "experts: counts of the next expert": (
        "experts",
        lambda: numerics("npu::npu_grouped_matmul", changed(group_list=lambda c: c.roll(1))),
    ),
    "experts: activations' scales dropped": (
        "experts-int8",
        lambda: numerics("npu::npu_grouped_matmul", changed(per_token_scale=lambda s: [torch.ones_like(s[0])])),
    ),
    "delta: gate dropped": ("delta", lambda: numerics("npu::npu_chunk_gated_delta_rule", changed(g=torch.zeros_like))),
    "delta: accepted tokens ignored": (
        "delta-drafts",
        lambda: numerics("npu::npu_recurrent_gated_delta_rule", changed(num_accepted_tokens=torch.ones_like)),
    ),
    "delta: states not transposed": (
        "delta",
        lambda: patched("core_ascend.ops.recurrent", "_from_call", lambda _: lambda s, d: s.to(d)),
    ),
    "prolog: the latent is not normed": (
        "prolog",
        lambda: numerics("npu::npu_rms_norm", lambda _: lambda x, g, epsilon=1e-6: (x.clone(), x[..., :1].float())),
    ),
}


def _whole_requests(plan: Any) -> None:
    ends = dict(zip(plan.query_ends, plan.kv_lens, strict=True))
    plan.piece_lens = [next(n for end, n in ends.items() if end >= piece) for piece in plan.piece_ends]


def _first_twice(base: Any, packed: Any) -> Any:
    parts = base.parts(packed)
    return [parts[0], (parts[0][0][:, : parts[1][0].shape[1]], parts[1][1])] if len(parts) == 2 else parts


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(subject: Subject, name: str) -> None:
    check, plant = MUTANTS[name]
    with plant(), pytest.raises((AssertionError, RuntimeError)):
        CHECKS[check](subject)

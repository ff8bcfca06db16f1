"""Steps of latent attention over a paged cache, and latent attention as one writes it down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import MlaArgs, MlaOp
from core.spec import CacheKind
from core_conformance.diagnosis import Suspects
from core_conformance.operations.cache_memory import latent_cache
from core_conformance.operations.paged import PagedCache
from core_conformance.subject import Subject
from core_conformance.tolerance import COMPOSITE_RATIO, attention_floor

__all__ = ["LatentStep", "latent_bound", "latent_by_hand", "latent_suspects"]


class LatentStep(PagedCache):
    """A step of `mla`.

    Args:
        subject: The backend.
        op: The operation.
        query_lens: As in `PagedCache`.
        seq_lens: As in `PagedCache`.
        options: As in `PagedCache`.
    """

    def __init__(
        self, subject: Subject, op: MlaOp, query_lens: Sequence[int], seq_lens: Sequence[int], **options: Any
    ) -> None:
        spec = latent_cache(CacheKind.MLA, op.latent_dim + op.rope_dim, op.kv_dtype)
        super().__init__(subject, spec, (op,), query_lens, seq_lens, **options)
        self.op = op
        dtype = torch_dtype(op.dtype)
        self.q_latent, self.q_rope = (
            torch.randn(self.num_tokens, op.num_heads, dim, generator=self.draw).to(dtype)
            for dim in (op.latent_dim, op.rope_dim)
        )

    def run(self, *, indices: Tensor | None = None, lse: Tensor | None = None) -> Tensor:
        """The device's answer; queries of padding are NaN."""
        parts = [self.q_latent.clone(), self.q_rope.clone()]
        for part in parts:
            part[self.real.stop :] = float("nan")
        put = self.subject.put
        args = MlaArgs(
            q_latent=put(parts[0]),
            q_rope=put(parts[1]),
            cache=self.filled_cache(),
            plan=self.plan(),
            indices=None if indices is None else put(indices),
            lse=lse,
        )
        out: Tensor = self.subject.bind(self.op)(args)
        return out

    def indices(self, count: int) -> Tensor:
        """[tokens, count]: for each query some positions that it sees, in any order; -1 behind them.

        Every other query has half as many, so that -1 also stands where there are keys that were not chosen.
        """
        found = torch.full((self.num_tokens, count), -1, dtype=torch.int32)
        for token, (_, position) in enumerate(self.queries):
            most = count if token % 2 else max(1, count // 2)
            chosen = torch.randperm(position + 1, generator=self.draw)[:most].to(torch.int32)
            found[token, : len(chosen)] = chosen
        return found


def latent_by_hand(
    step: LatentStep,
    *,
    rounded: bool = False,
    more_keys: int = 0,
    factor: float = 1.0,
    rope: bool = True,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Latent attention in float64; in float32 with probabilities in the model's type where `rounded`.

    Args:
        step: The step.
        rounded: See above.
        more_keys: Keys that a query sees beyond its position; negative for fewer.
        factor: On the scale.
        rope: Whether the rotated part counts.
        indices: Positions that each query may see.

    Returns:
        (out [real tokens, num_heads, latent_dim], log-sum-exp [real tokens, num_heads]).
    """
    op, start = step.op, 0
    wide = torch.float32 if rounded else torch.float64
    outs, lses = [torch.zeros(0, op.num_heads, op.latent_dim, dtype=wide)], [torch.zeros(0, op.num_heads, dtype=wide)]
    for count, length, stored in zip(step.query_lens, step.seq_lens, step.keys, strict=True):
        keys, tokens = stored[:, 0].to(wide), slice(start, start + count)
        start += count
        logits = torch.einsum("thl,kl->thk", step.q_latent[tokens].to(wide), keys[:, : op.latent_dim])
        if rope:
            logits = logits + torch.einsum("thr,kr->thk", step.q_rope[tokens].to(wide), keys[:, op.latent_dim :])
        at, position = torch.arange(length), torch.arange(length - count, length)[:, None]
        seen = at <= (position + more_keys).clamp(min=0)
        if indices is not None:
            seen = seen & (indices[tokens].long()[:, :, None] == at).any(1)
        logits = (logits * (op.scale * factor)).masked_fill(~seen[:, None], float("-inf"))
        weights = torch.softmax(logits, dim=-1).nan_to_num()
        weights = weights.to(torch_dtype(op.dtype)).float() if rounded else weights
        outs.append(torch.einsum("thk,kl->thl", weights, keys[:, : op.latent_dim]))
        lses.append(torch.logsumexp(logits, dim=-1))
    out = torch.cat(outs)
    return (out.to(torch_dtype(op.dtype)) if rounded else out), torch.cat(lses)


def latent_bound(step: LatentStep, exact: Tensor, indices: Tensor | None = None) -> Tensor:
    """Twice the plain implementation's largest error, and what rounding of float32 logits alone may do."""
    op = step.op
    largest = max((float(key.float().abs().max()) for key in step.keys), default=1.0)
    sums = step.q_latent.float().abs().sum(-1) + step.q_rope.float().abs().sum(-1)
    plain, _ = latent_by_hand(step, rounded=True, indices=indices)
    measured = float((plain.double() - exact).abs().max()) if exact.numel() else 0.0
    floor = attention_floor(abs(op.scale) * float(sums.max()) * largest, largest, op.latent_dim + op.rope_dim)
    return torch.full_like(exact, COMPOSITE_RATIO * measured + floor)


def latent_suspects(step: LatentStep, indices: Tensor | None = None) -> Suspects:
    """What the usual bugs of latent attention answer."""

    def suspects(got: Tensor) -> dict[str, Tensor]:
        usual: dict[str, dict[str, Any]] = {
            "tail: the newest key of each query is left out": {"more_keys": -1},
            "mask: each query reads one key past its position": {"more_keys": 1},
            "rope: the rotated part of the key does not count": {"rope": False},
            "scale: logits are not scaled": {"factor": 1 / step.op.scale},
        }
        found = {name: latent_by_hand(step, indices=indices, **how)[0] for name, how in usual.items()}
        if indices is not None:
            found["indices: they are ignored, every key is read"] = latent_by_hand(step)[0]
        return found

    return suspects

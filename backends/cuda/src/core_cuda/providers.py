"""Attention by another package, where an operator chose it: `CORE_CUDA_ATTENTION=flash_attn`. UNTESTED on a device.

The choice is for all of a model's attention: what the package cannot do is refused, and not done in another way.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend import Capture, Plan, UnsupportedError, Verdict
from core.backend.ops import AttentionArgs, AttentionOp, Determinism
from core.spec import DType

__all__ = ["FLASH_BLOCK_SIZE", "VARIABLE", "bind", "chosen", "refusal", "verdict"]

VARIABLE = "CORE_CUDA_ATTENTION"
"""Names the provider; "triton", or not set, are this project's own kernels."""
FLASH_BLOCK_SIZE = 256
"""Tokens of a page that flash-attn 2 takes; multiples would do too."""
_FLASH = "flash_attn"
_TYPES = (DType.BFLOAT16, DType.FLOAT16)


def chosen() -> str:
    """The provider by name; empty for the own kernels."""
    name = os.environ.get(VARIABLE, "").strip().lower()
    return "" if name == "triton" else name


def refusal(op: AttentionOp) -> str:
    """Why the chosen provider does not do `op`, ending with what to do; empty where it does."""
    name = chosen()
    if name != _FLASH:
        return f"{VARIABLE}={name} is no provider; write flash_attn or triton"
    if importlib.util.find_spec(_FLASH) is None:
        return f"{VARIABLE}={name} is set and flash_attn is not installed; pip install flash-attn, or unset it"
    missing = [
        (op.features, f"has no {', '.join(sorted(op.features))}"),
        (
            op.dtype not in _TYPES or op.kv_dtype is not op.dtype,
            "wants bfloat16 or float16, in the cache too",
        ),
        (max(op.head_dim, op.v_head_dim) > 256, "has heads of at most 256"),
        (op.head_dim != op.v_head_dim, "wants keys and values of one size"),
        (op.determinism > Determinism.D1, f"is not {op.determinism.name}"),
    ]
    reason = next((words for holds, words in missing if holds), "")
    return f"flash_attn {reason}; unset {VARIABLE}" if reason else ""


def verdict(op: AttentionOp) -> Verdict:
    """NATIVE by the provider, or NO: an explicit choice is not given up silently."""
    reason = refusal(op)
    if reason:
        return Verdict.no(reason)
    return Verdict.native(reason="flash_attn", capture=Capture.UNIFORM, determinism=Determinism.D1)


def bind(op: AttentionOp) -> Callable[[Any], Any]:
    """The provider's call.

    Raises:
        UnsupportedError: `verdict` does not say NATIVE.
    """
    reason = refusal(op)
    if reason:
        raise UnsupportedError(op.describe(), reason, "see `core doctor`")
    call = importlib.import_module(_FLASH).flash_attn_varlen_func
    window = (op.window - 1, 0 if op.causal else -1) if op.window else (-1, -1)

    def run(args: AttentionArgs) -> Tensor:
        assert args.cache is not None, "there is no ragged mode"
        plan = args.plan
        ends = torch.cumsum(plan.seq_lens, 0, dtype=torch.int32)
        out: Tensor = call(
            args.query,
            args.cache[0],
            args.cache[1],
            cu_seqlens_q=plan.query_start_loc,
            cu_seqlens_k=torch.nn.functional.pad(ends, (1, 0)),
            max_seqlen_q=plan.batch.max_query_len,
            max_seqlen_k=plan.block_table.shape[1] * FLASH_BLOCK_SIZE,  # a bound that a replay keeps to
            softmax_scale=op.scale,
            causal=op.causal,
            window_size=window,
            softcap=op.softcap,
            block_table=plan.block_table,
        )
        return _without_padding(out, plan)

    return run


def _without_padding(out: Tensor, plan: Plan) -> Tensor:
    """Padding tokens read the null block, which may hold anything: their rows become zero."""
    padding = torch.arange(out.shape[0], device=out.device) >= plan.batch.num_valid_tokens
    return out.masked_fill_(padding[:, None, None], 0.0)

"""attention: one kernel, launched for decodes with the keys cut into parts, and for longer queries without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import Capture, Verdict, torch_dtype
from core.backend.ops import AttentionArgs, AttentionOp, Determinism
from core.spec import DType
from core_triton.ops.caches import CACHE_WORDS, LIMITS, cache_words, num_parts, page_of, refuse_cache
from core_triton.ops.merge import join_parts
from core_triton.ops.refusals import FLOATS, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import Tuning, tunings

__all__: list[str] = []

_FEATURES = ("sinks", "lse", "scales", "ragged")
_MOST_HEADS, _MOST_DIM = 64, 256


def _tuning(phase: str, op: AttentionOp, target: Target) -> Tuning:
    dim, found = max(op.head_dim, op.v_head_dim), tunings("attention", target)
    name = f"{phase}{64 if dim <= 64 else 128 if dim <= 128 else 256}"
    if op.dtype is DType.FLOAT32:
        return found[f"{name}f32"]
    narrow = not op.has("ragged") and op.kv_dtype in LIMITS
    return found.get(f"{name}c8", found[name]) if narrow else found[name]


def _constants(op: AttentionOp, tuning: Tuning, *, page: int, last_pass: bool, per_token: bool) -> dict[str, Any]:
    """The kernel's `tl.constexpr` arguments.

    Args:
        last_pass: Whether the launch writes results and not parts of them.
        per_token: Whether a tile holds one token alone.
    """
    group = op.num_heads // op.num_kv_heads
    block_m = max(tuning["BLOCK_M"], power_of_two(group))
    block_d = max(16, power_of_two(op.head_dim))
    return {
        "GROUP": group,
        "HEAD_DIM": op.head_dim,
        "V_DIM": op.v_head_dim,
        "PAGE": page,
        "CAUSAL": op.causal,
        "WINDOW": op.causal and op.window > 0,
        "SOFTCAP": op.softcap > 0,
        "SCALES": op.has("scales") and page > 0,
        "SINKS": op.has("sinks") and last_pass,
        "LSE": op.has("lse") or not last_pass,
        "BLOCK_M": block_m,
        "BLOCK_N": tuning["BLOCK_N"],
        "BLOCK_D": block_d,
        "BLOCK_V": max(16, power_of_two(op.v_head_dim)),
        "BLOCK_P": min(tuning.sizes.get("BLOCK_P", block_d), block_d),
        "BLOCK_Q": 1 if per_token else block_m // group,
    }


class _Attention:
    """The bound operation."""

    def __init__(self, op: AttentionOp, target: Target) -> None:
        self._op = op
        self._dtype = torch_dtype(op.dtype)
        self._decode = _tuning("decode", op, target)
        # Asked for more than D1, a request is done in one way whatever is beside it, and a token so for D3.
        self._fixed = op.determinism >= Determinism.D2
        self._per_token = op.determinism >= Determinism.D3
        self._prefill = self._decode if self._per_token else _tuning("prefill", op, target)

    def __call__(self, args: AttentionArgs) -> Tensor:
        query, batch = args.query, args.plan.batch
        shape = (query.shape[0], self._op.num_heads, self._op.v_head_dim)
        out = torch.empty(shape, dtype=self._dtype, device=query.device)
        decodes = 0 if self._fixed else self._short(args)
        if decodes:
            self._launch(args, out, self._decode, 0, decodes)
        if decodes < batch.num_reqs and query.shape[0]:
            self._launch(args, out, self._prefill, decodes, batch.num_reqs)
        return out

    def _short(self, args: AttentionArgs) -> int:
        """Leading requests whose tokens fit one tile of the decode launch."""
        batch, group = args.plan.batch, self._op.num_heads // self._op.num_kv_heads
        most = max(self._decode["BLOCK_M"], power_of_two(group)) // group
        if batch.max_query_len <= most:
            return batch.num_reqs
        count, starts = batch.num_decodes, batch.query_start_loc_host
        return count if count and starts[count] - starts[count - 1] <= most else 0

    def _launch(self, args: AttentionArgs, out: Tensor, tuning: Tuning, first: int, last: int) -> None:
        from core_triton.kernels.attention import attention_kernel

        op, plan, page = self._op, args.plan, page_of(args.cache)
        key, value = (args.key, args.value) if args.cache is None else args.cache[:2]
        assert key is not None and value is not None, "ragged attention needs key and value"
        starts = plan.batch.query_start_loc_host
        tokens, requests = starts[last] - starts[first], last - first
        if not tokens:
            return
        fits = plan.batch.max_query_len if last == plan.batch.num_reqs else starts[last] - starts[last - 1]
        sizes = _constants(op, tuning, page=page, last_pass=True, per_token=self._per_token)
        sizes["ONE_TILE"] = fits <= sizes["BLOCK_Q"]
        tiles = requests if sizes["ONE_TILE"] else tokens // sizes["BLOCK_Q"] + requests
        parts = num_parts(tuning, plan, tiles * op.num_kv_heads, page, fixed=self._fixed)
        results, lses = out, args.lse
        if parts > 1:
            sizes |= {"SINKS": False, "LSE": True}
            results = torch.empty((parts, *out.shape), dtype=torch.float32, device=out.device)
            lses = torch.empty((parts, *out.shape[:2]), dtype=torch.float32, device=out.device)
        k_block, k_token, k_head = (0, *key.stride()[:2]) if not page else key.stride()[:3]
        v_block, v_token, v_head = (0, *value.stride()[:2]) if not page else value.stride()[:3]
        scaled = sizes["SCALES"]
        attention_kernel[(tiles, op.num_kv_heads, parts)](
            args.query,
            key,
            value,
            results,
            results if lses is None else lses,
            plan.query_start_loc[first:],
            plan.seq_lens[first:],
            plan.block_table[first:],
            args.k_scale if scaled else key,
            args.v_scale if scaled else key,
            args.sinks if sizes["SINKS"] else key,
            requests,
            out.shape[0],
            op.scale,
            op.softcap,
            op.window,
            args.query.stride(0),
            args.query.stride(1),
            k_block,
            k_token,
            k_head,
            v_block,
            v_token,
            v_head,
            plan.block_table.stride(0),
            1 if scaled and args.k_scale is not None and args.k_scale.numel() > 1 else 0,
            **sizes,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
        )
        if parts > 1:
            rows = slice(starts[first], starts[last])
            self._join(args, results, lses, out, rows)

    def _join(self, args: AttentionArgs, results: Tensor, lses: Tensor | None, out: Tensor, rows: slice) -> None:
        assert lses is not None
        # Decodes lead the batch: of all other rows nothing was written.
        whole = rows == slice(0, out.shape[0])
        if not whole:
            results, lses = results[:, rows].contiguous(), lses[:, rows].contiguous()
        join_parts(results, lses, out[rows], None if args.lse is None else args.lse[rows], args.sinks)


def _refuse(op: AttentionOp, target: Target) -> str:
    if op.num_heads // op.num_kv_heads > _MOST_HEADS:
        return f"no kernel for more than {_MOST_HEADS} query heads a key head"
    if max(op.head_dim, op.v_head_dim) > _MOST_DIM:
        return f"no kernel for heads of more than {_MOST_DIM}"
    return refuse_form(op, _FEATURES) or ("" if op.has("ragged") else refuse_cache(op.kv_dtype, target))


def _verdict(op: AttentionOp, target: Target) -> Verdict:
    return Verdict.native(capture=Capture.UNIFORM, determinism=max(op.determinism, Determinism.D1))


_PAGE, _SMALL_PAGE = 64, 16
_POINTERS = {"lse": "*fp32", "starts": "*i32", "seq_lens": "*i32", "block_table": "*i32"}
_NUMBERS = ("num_requests", "num_tokens", "window", "q_stride", "q_head_stride", "k_block_stride", "k_stride")
_MORE_NUMBERS = ("k_head_stride", "v_block_stride", "v_stride", "v_head_stride", "table_stride", "scale_stride")
_DIVISIBLE = ("query", "key", "value", "out", *(name for name in (*_NUMBERS, *_MORE_NUMBERS) if "_stride" in name))


def _build(label: str, op: AttentionOp, phase: str, target: Target, *, page: int = _PAGE, parts: bool = False) -> Build:
    from core_triton.kernels.attention import attention_kernel

    tuning = _tuning(phase, op, target)
    word, kept = FLOATS[op.dtype], CACHE_WORDS[op.kv_dtype]
    return Build(
        kernel=attention_kernel,
        label=label,
        signature={
            "query": f"*{word}",
            "key": f"*{kept}",
            "value": f"*{kept}",
            "out": "*fp32" if parts else f"*{word}",
            **_POINTERS,
            **dict.fromkeys(("k_scale", "v_scale", "sinks"), "*fp32"),
            **dict.fromkeys(("scale", "softcap"), "fp32"),
            **dict.fromkeys((*_NUMBERS, *_MORE_NUMBERS), "i32"),
        },
        constexprs={
            **_constants(op, tuning, page=0 if op.has("ragged") else page, last_pass=not parts, per_token=False),
            "ONE_TILE": phase == "decode",
        },
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        matrix=op.dtype is not DType.FLOAT32,
        divisible=tuple(name for name in _DIVISIBLE if name not in ("table_stride", "scale_stride")),
    )


def _cases(target: Target) -> Iterator[tuple[str, AttentionOp]]:
    def op(dtype: DType, dim: int, **changes: Any) -> AttentionOp:
        features = frozenset(changes.pop("features", ()))
        fields: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "v_head_dim": dim, "kv_dtype": dtype, "scale": 1.0}
        return AttentionOp(dtype=dtype, head_dim=dim, features=features, **(fields | changes))

    for dtype, word in FLOATS.items():
        for dim in (64, 128, 256) if dtype is not DType.FLOAT16 else (128,):
            yield f"{word} head {dim}", op(dtype, dim)
    bf16 = DType.BFLOAT16
    yield "bf16 head 80", op(bf16, 80)
    yield "bf16 head 192 value 128", op(bf16, 192, v_head_dim=128, num_kv_heads=8)
    yield "bf16 sinks window", op(bf16, 64, features=("sinks",), window=128)
    yield "bf16 softcap window lse", op(bf16, 128, features=("lse",), softcap=50.0, window=4096)
    yield "bf16 ragged bidirectional", op(bf16, 128, features=("ragged",), causal=False)
    for dtype, word in cache_words(target).items():
        yield f"bf16 cache {word}", op(bf16, 128, kv_dtype=dtype, features=("scales",))


def _builds(target: Target) -> Sequence[Build]:
    found = []
    for label, op in _cases(target):
        found.append(_build(f"prefill {label}", op, "prefill", target))
        if not op.has("ragged"):
            found.append(_build(f"decode {label}", op, "decode", target, parts=not op.has("sinks")))
    label, op = next((label, op) for label, op in _cases(target) if op.head_dim == 128)
    for phase in ("prefill", "decode"):
        short = f"{phase} {label}, blocks of {_SMALL_PAGE}"
        found.append(_build(short, op, phase, target, page=_SMALL_PAGE, parts=phase == "decode"))
    return found


register("attention", Kernel(refuse=_refuse, bind=_Attention, builds=_builds, verdict=_verdict))

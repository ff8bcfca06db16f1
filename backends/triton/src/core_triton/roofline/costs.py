"""What an operation has to move and to compute, whoever does it: each byte once, each product once.

Caches, tables of block ids and whatever else is small beside the tensors is left out. A multiply-add is two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from core.backend.ops import OpSpec
from core.backend.schemes import GGUF_BLOCKS
from core.errors import CoreError
from core.spec import DType

__all__ = ["COSTS", "Cost", "Sizes", "cost_of"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is known at run time alone.

    Args:
        tokens: Tokens of the step.
        requests: Requests of the step, with tokens in equal shares.
        context: Keys of a request when the step is done.
    """

    tokens: int
    requests: int = 1
    context: int = 0

    @property
    def query_len(self) -> float:
        """Tokens of a request in the step."""
        return self.tokens / self.requests


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes and operations of one call.

    Args:
        read_bytes: Weights, activations and cache, each once.
        written_bytes: Results.
        operations: Of products; elementwise work is not counted, since the bytes bound it.
        dtype: In which the products are.
    """

    read_bytes: float
    written_bytes: float
    operations: float
    dtype: DType

    @property
    def bytes_moved(self) -> float:
        """Read and written."""
        return self.read_bytes + self.written_bytes


_FLOAT, _INDEX = 4, 4
_E4M3, _INT8 = DType.FLOAT8_E4M3FN, DType.INT8


def cost_of(op: OpSpec, sizes: Sizes) -> Cost:
    """The cost of one call of `op`.

    Raises:
        CoreError: the operation has none on a chip alone (it is traffic between ranks).
    """
    if op.name not in COSTS:
        raise CoreError(f"{op.name} is traffic between ranks or blocks, without a cost of the chip alone; leave it out")
    return COSTS[op.name](op, sizes)


def _elementwise(op: OpSpec, read: float, written: float) -> Cost:
    return Cost(read_bytes=read, written_bytes=written, operations=0.0, dtype=op.dtype)


def _weight_bytes(scheme: str, rows: int, columns: int, dense: DType) -> float:
    """Of a weight [rows, columns] as it is stored, scales included."""
    elements = float(rows * columns)
    if scheme == "none":
        return elements * dense.itemsize
    if scheme in GGUF_BLOCKS:
        block, size, _ = GGUF_BLOCKS[scheme]
        return elements / block * size
    if scheme.startswith("int4"):
        return elements / 2 + elements / 128 * (dense.itemsize + 1)
    scales = elements / 128 / 128 if scheme == "fp8_block" else float(rows)
    return elements + scales * _FLOAT


def _product_dtype(scheme: str, dense: DType) -> DType:
    return _E4M3 if scheme.startswith("fp8") else _INT8 if scheme == "int8" else dense


def _embed(op: Any, s: Sizes) -> Cost:
    rows = _weight_bytes(op.scheme, s.tokens, op.dim, op.dtype)
    return _elementwise(op, rows + s.tokens * _INDEX, s.tokens * op.dim * op.dtype.itemsize)


def _linear(op: Any, s: Sizes) -> Cost:
    weight = _weight_bytes(op.scheme, op.out_features, op.in_features, op.weight_dtype)
    return Cost(
        read_bytes=weight + s.tokens * op.in_features * op.dtype.itemsize,
        written_bytes=s.tokens * op.out_features * op.out_dtype.itemsize,
        operations=2.0 * s.tokens * op.in_features * op.out_features,
        dtype=_product_dtype(op.scheme, op.dtype),
    )


def _norm(op: Any, s: Sizes) -> Cost:
    rows = s.tokens * op.dim * op.dtype.itemsize
    planes = 2 if op.name == "reduce_norm" or op.has("residual") else 1
    return _elementwise(op, planes * rows + op.dim * op.dtype.itemsize, planes * rows)


def _act_mul(op: Any, s: Sizes) -> Cost:
    size = s.tokens * op.size * op.dtype.itemsize
    return _elementwise(op, 2 * size, size)


def _rope(op: Any, s: Sizes) -> Cost:
    heads = s.tokens * (op.num_heads + op.num_kv_heads) * op.rotary_dim * op.dtype.itemsize
    return _elementwise(op, heads + s.tokens * op.rotary_dim * _FLOAT, heads)


def _kv_write(op: Any, s: Sizes) -> Cost:
    elements = s.tokens * op.num_kv_heads * (op.head_dim + op.v_head_dim)
    return _elementwise(op, elements * op.dtype.itemsize, elements * op.kv_dtype.itemsize)


def _qk_norm_rope_write(op: Any, s: Sizes) -> Cost:
    heads = s.tokens * (op.num_heads + op.num_kv_heads) * op.head_dim * op.dtype.itemsize
    values = s.tokens * op.num_kv_heads * op.v_head_dim
    stored = s.tokens * op.num_kv_heads * (op.head_dim + op.v_head_dim) * op.kv_dtype.itemsize
    read = heads + values * op.dtype.itemsize + s.tokens * op.rotary_dim * _FLOAT
    return _elementwise(op, read, heads + stored)


def _pairs(s: Sizes, *, causal: bool, window: int = 0) -> float:
    """Pairs of query and key that a step has, over all requests."""
    q, n = s.query_len, float(s.context)
    mean = n - (q - 1) / 2 if causal else n
    return s.tokens * (min(mean, window) if window else mean)


def _attention(op: Any, s: Sizes) -> Cost:
    seen = min(s.context, op.window + s.query_len - 1) if op.window else s.context
    dims = op.head_dim + op.v_head_dim
    kv = s.requests * seen * op.num_kv_heads * dims * op.kv_dtype.itemsize
    return Cost(
        read_bytes=kv + s.tokens * op.num_heads * op.head_dim * op.dtype.itemsize,
        written_bytes=s.tokens * op.num_heads * op.v_head_dim * op.dtype.itemsize,
        operations=2.0 * _pairs(s, causal=op.causal, window=op.window) * op.num_heads * dims,
        dtype=op.dtype,
    )


def _mla(op: Any, s: Sizes, top_k: int = 0) -> Cost:
    seen = min(s.context, top_k) if top_k else s.context
    # Chosen positions differ from token to token, so that each reads its own.
    rows = s.tokens * seen if top_k else s.requests * seen
    pairs = float(s.tokens * seen) if top_k else _pairs(s, causal=True)
    width = op.latent_dim + op.rope_dim
    return Cost(
        read_bytes=rows * width * op.kv_dtype.itemsize + s.tokens * op.num_heads * width * op.dtype.itemsize,
        written_bytes=s.tokens * op.num_heads * op.latent_dim * op.dtype.itemsize,
        operations=2.0 * pairs * op.num_heads * (width + op.latent_dim),
        dtype=op.dtype,
    )


_SPARSE_TOP_K = 2048
"""Positions that sparse attention reads where nothing else is known: DeepSeek-V3.2's."""


def _mla_of(op: Any, s: Sizes) -> Cost:
    return _mla(op, s, _SPARSE_TOP_K if op.has("sparse") else 0)


def _mla_prolog(op: Any, s: Sizes) -> Cost:
    width = op.latent_dim + op.rope_dim
    up = float(op.num_heads * op.latent_dim * op.nope_dim)
    queries = s.tokens * op.num_heads * (op.nope_dim + op.rope_dim)
    return Cost(
        read_bytes=(up + queries + s.tokens * width) * op.dtype.itemsize,
        written_bytes=s.tokens * (op.num_heads * width * op.dtype.itemsize + width * op.kv_dtype.itemsize),
        operations=2.0 * s.tokens * up,
        dtype=op.dtype,
    )


def _index_topk(op: Any, s: Sizes) -> Cost:
    keys = s.requests * s.context * op.head_dim * op.kv_dtype.itemsize
    return Cost(
        read_bytes=keys + s.tokens * op.num_heads * (op.head_dim * op.dtype.itemsize + _FLOAT),
        written_bytes=s.tokens * op.top_k * _INDEX,
        operations=2.0 * _pairs(s, causal=True) * op.num_heads * op.head_dim,
        dtype=op.dtype,
    )


def _route(op: Any, s: Sizes) -> Cost:
    return _elementwise(op, s.tokens * op.num_experts * _FLOAT, s.tokens * op.top_k * (_FLOAT + _INDEX))


def _experts(op: Any, s: Sizes) -> Cost:
    rows = s.tokens * op.top_k
    # Of n experts, r uniform choices leave (1 - 1/n)^r untouched.
    hit = op.num_experts * (1.0 - (1.0 - 1.0 / op.num_experts) ** rows)
    weight = _weight_bytes(op.scheme, 3 * op.intermediate_size, op.hidden_size, op.dtype)
    return Cost(
        read_bytes=hit * weight + s.tokens * op.hidden_size * op.dtype.itemsize,
        written_bytes=s.tokens * op.hidden_size * op.dtype.itemsize,
        operations=2.0 * rows * 3 * op.intermediate_size * op.hidden_size,
        dtype=_product_dtype(op.scheme, op.dtype),
    )


def _conv1d(op: Any, s: Sizes) -> Cost:
    size = s.tokens * op.channels * op.dtype.itemsize
    state = s.requests * (op.width - 1) * op.channels * op.dtype.itemsize
    return _elementwise(op, size + state + op.width * op.channels * op.dtype.itemsize, size + state)


def _gated_delta(op: Any, s: Sizes) -> Cost:
    keys, values = op.num_k_heads * op.k_dim, op.num_v_heads * op.v_dim
    state = float(s.requests * op.num_v_heads * op.k_dim * op.v_dim * _FLOAT)
    return Cost(
        read_bytes=state + s.tokens * ((2 * keys + values) * op.dtype.itemsize + 2 * op.num_v_heads * _FLOAT),
        written_bytes=state + s.tokens * values * op.dtype.itemsize,
        # S^T k, k (...)^T and S^T q: three products of a token with the state of each head.
        operations=6.0 * s.tokens * op.num_v_heads * op.k_dim * op.v_dim,
        dtype=op.dtype,
    )


def _ssd(op: Any, s: Sizes) -> Cost:
    inner, groups = op.num_heads * op.head_dim, op.num_groups * op.state_dim
    state = float(s.requests * inner * op.state_dim * _FLOAT)
    return Cost(
        read_bytes=state + s.tokens * ((inner + 2 * groups) * op.dtype.itemsize + op.num_heads * _FLOAT),
        written_bytes=state + s.tokens * inner * op.dtype.itemsize,
        operations=4.0 * s.tokens * inner * op.state_dim,
        dtype=op.dtype,
    )


def _merge_lse(op: Any, s: Sizes) -> Cost:
    part = s.tokens * op.num_heads * (op.v_head_dim * op.dtype.itemsize + _FLOAT)
    return _elementwise(op, 2 * part, part)


def _sample(op: Any, s: Sizes) -> Cost:
    return _elementwise(op, s.requests * op.vocab_size * _FLOAT, s.requests * _INDEX)


def _bitmask(op: Any, s: Sizes) -> Cost:
    logits = s.requests * op.vocab_size * _FLOAT
    return _elementwise(op, s.requests * op.vocab_size / 8, logits)


def _rejection(op: Any, s: Sizes) -> Cost:
    rows = s.requests * (op.num_spec_tokens + 1)
    return _elementwise(op, rows * op.vocab_size * _FLOAT, rows * _INDEX)


def _advance(op: Any, s: Sizes) -> Cost:
    return _elementwise(op, s.requests * 6 * _INDEX, s.requests * 4 * _INDEX)


def _lora(op: Any, s: Sizes) -> Cost:
    weight = op.num_adapters * op.rank * (op.in_features + op.out_features) * op.dtype.itemsize
    rows = s.tokens * op.dtype.itemsize
    return Cost(
        read_bytes=weight + rows * (op.in_features + op.out_features),
        written_bytes=rows * op.out_features,
        operations=2.0 * s.tokens * op.rank * (op.in_features + op.out_features),
        dtype=op.dtype,
    )


COSTS: Mapping[str, Callable[[Any, Sizes], Cost]] = {
    "act_mul": _act_mul,
    "advance": _advance,
    "apply_token_bitmask": _bitmask,
    "attention": _attention,
    "conv1d": _conv1d,
    "embed": _embed,
    "experts": _experts,
    "gated_delta": _gated_delta,
    "index_topk": _index_topk,
    "kv_write": _kv_write,
    "linear": _linear,
    "lora_add_": _lora,
    "merge_lse": _merge_lse,
    "mla": _mla_of,
    "mla_prolog": _mla_prolog,
    "qk_norm_rope_write": _qk_norm_rope_write,
    "reduce_norm": _norm,
    "rejection_sample": _rejection,
    "rms_norm": _norm,
    "rope": _rope,
    "route": _route,
    "sample": _sample,
    "ssd": _ssd,
}
"""By the operation's name."""

"""The kernels over torch tensors: each function checks dtypes, shapes and strides, then passes addresses on.

A wrong argument is an error of the caller inside the engine, never a user's: it raises ValueError with the value. The
GIL is released inside. Outputs are new tensors unless `out` is given.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from core_cpu import _kernels
from core_cpu.tape_memory import empty

__all__ = [
    "ACTIVATIONS",
    "BLOCK_MULTIPLE",
    "DTYPE_CODES",
    "AttentionKernel",
    "KvPlanes",
    "PackedWeight",
    "Scheme",
    "act_mul",
    "attention",
    "attention_ragged",
    "copy_blocks",
    "dequantize",
    "embed",
    "isa",
    "isa_levels",
    "kv_block_shapes",
    "kv_read",
    "kv_write",
    "kv_write_planned",
    "linear",
    "num_threads",
    "pack",
    "rms_norm",
    "rope",
    "sample",
    "set_num_threads",
    "token_bitmask",
]

BLOCK_MULTIPLE = 16
"""KV block sizes are multiples of it: keys of a block lie in panels of 16."""

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types of activations and dense weights, as the extension numbers them."""


class Scheme(enum.IntEnum):
    """How a packed weight is stored; values are those of the extension."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    FP8 = 4
    Q8_0 = 5
    Q4_0 = 6
    Q4_1 = 7
    Q5_0 = 8
    Q5_1 = 9
    Q4_K = 10
    Q5_K = 11
    Q6_K = 12


_DENSE = {torch.float32: Scheme.F32, torch.bfloat16: Scheme.BF16, torch.float16: Scheme.F16}
_GGUF_BLOCKS = {
    Scheme.Q8_0: (32, 34),
    Scheme.Q4_0: (32, 18),
    Scheme.Q4_1: (32, 20),
    Scheme.Q5_0: (32, 22),
    Scheme.Q5_1: (32, 24),
    Scheme.Q4_K: (256, 144),
    Scheme.Q5_K: (256, 176),
    Scheme.Q6_K: (256, 210),
}
_FP8_TILE_FACTOR = 256.0
"""FP8 panels expand to value * 2^-8; the row scale makes up for it."""


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)


def _dtype(x: Tensor, name: str) -> int:
    code = DTYPE_CODES.get(x.dtype)
    if code is None:
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}")
    return code


def _int32(x: Tensor, name: str, dims: int = 1) -> int:
    ok = x.dtype == torch.int32 and x.dim() == dims and (x.numel() == 0 or x.stride(-1) == 1)
    _require(ok, f"{name} must be int32, {dims}-dimensional and contiguous, got {x.dtype} {tuple(x.shape)}")
    return x.data_ptr()


def _float32(x: Tensor, name: str, shape: tuple[int, ...]) -> int:
    ok = x.dtype == torch.float32 and tuple(x.shape) == shape and x.is_contiguous()
    _require(ok, f"{name} must be float32 {shape}, contiguous, got {x.dtype} {tuple(x.shape)}")
    return x.data_ptr()


def isa() -> str:
    """Name of the instruction-set level in use."""
    return _kernels.isa()


def isa_levels() -> list[str]:
    """Levels that this build and this machine share, from low to high."""
    return _kernels.isa_levels()


def num_threads() -> int:
    """Threads that a kernel may use."""
    return _kernels.num_threads()


def set_num_threads(count: int) -> None:
    """Threads of later calls; 0 takes what the runtime says."""
    _require(count >= 0, f"the number of threads must be at least 0, got {count}")
    _kernels.set_num_threads(count)


# -- weights ---------------------------------------------------------------------------------------------------------


class PackedWeight:
    """A weight [n, k] in panels of 16 rows; made by `pack`.

    Attributes:
        scheme: How it is stored.
        shape: (n, k).
        tensors: What holds it: "panels" (uint8), and by scheme "row_scale", "block_scale" (float32), "row_sum" (int32).
            Their contents may be replaced, their addresses must stay.
    """

    __slots__ = ("handle", "scheme", "shape", "tensors")

    def __init__(self, scheme: Scheme, shape: tuple[int, int], tensors: dict[str, Tensor]) -> None:
        self.scheme = scheme
        self.shape = shape
        self.tensors = tensors
        parts = {name: t.data_ptr() for name, t in tensors.items() if name != "panels"}
        self.handle = _kernels.Weight(int(scheme), *shape, tensors["panels"].data_ptr(), **parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def pack(weight: Tensor, scheme: Scheme | None = None, scale: Tensor | None = None) -> PackedWeight:
    """Brings a checkpoint's weight into panels.

    Args:
        weight: [n, k] float32, bfloat16 or float16 (dense), int8, or float8_e4m3fn; [n, bytes of a row], uint8, for
            the GGUF schemes. Contiguous in the last dim, read-only, not kept.
        scheme: How to keep it; None keeps a dense, int8 or FP8 weight as it is.
        scale: int8: [n] or [n, 1]. FP8: one element, [n] or [n, 1], or [ceil(n / 128), ceil(k / 128)]. Float32,
            bfloat16, or UE8M0 exponents (float8_e8m0fnu, or uint8).
    """
    _require(weight.dim() == 2 and weight.stride(1) == 1, f"weight must be [n, k] rows, got {tuple(weight.shape)}")
    scheme = _scheme_of(weight) if scheme is None else scheme
    n, k = weight.shape[0], _logical_columns(weight, scheme)
    _require(n > 0 and k > 0, f"weight must not be empty, got {(n, k)}")
    padded = -(-n // 16) * 16
    tensors = {"panels": torch.empty(_kernels.packed_bytes(int(scheme), n, k), dtype=torch.uint8)}
    parts: dict[str, Tensor] = {}
    if scheme is Scheme.INT8:
        parts["row_sum"] = tensors["row_sum"] = torch.empty(padded, dtype=torch.int32)
    if scheme is Scheme.FP8:
        parts["row_nan"] = torch.empty(padded, dtype=torch.uint8)
    source_dtype = DTYPE_CODES.get(weight.dtype, 0)
    row_bytes = weight.stride(0) * weight.element_size()
    addresses = {name: t.data_ptr() for name, t in parts.items()}
    _kernels.pack(
        int(scheme), n, k, weight.data_ptr(), row_bytes, source_dtype, tensors["panels"].data_ptr(), **addresses
    )
    if scheme in (Scheme.INT8, Scheme.FP8):
        _require(scale is not None, f"a weight of scheme {scheme.name} needs a scale")
        assert scale is not None
        tensors |= _scales(scheme, scale, n, k, parts.get("row_nan"))
    return PackedWeight(scheme, (n, k), tensors)


def _scheme_of(weight: Tensor) -> Scheme:
    if weight.dtype == torch.int8:
        return Scheme.INT8
    if weight.dtype == torch.float8_e4m3fn:
        return Scheme.FP8
    found = _DENSE.get(weight.dtype)
    if found is None:
        raise ValueError(f"name the scheme of a weight in {weight.dtype}")
    return found


def _logical_columns(weight: Tensor, scheme: Scheme) -> int:
    if scheme not in _GGUF_BLOCKS:
        wanted = {Scheme.INT8: (torch.int8,), Scheme.FP8: (torch.float8_e4m3fn,)}.get(scheme, tuple(_DENSE))
        _require(weight.dtype in wanted, f"scheme {scheme.name} cannot hold a weight in {weight.dtype}")
        return weight.shape[1]
    elements, num_bytes = _GGUF_BLOCKS[scheme]
    ok = weight.dtype == torch.uint8 and weight.shape[1] % num_bytes == 0
    _require(ok, f"{scheme.name} rows are uint8 in blocks of {num_bytes} bytes, got {weight.dtype} {weight.shape[1]}")
    return weight.shape[1] // num_bytes * elements


def _scale_values(scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.reshape(scale.shape or (1,)).to(torch.float32)


def _scales(scheme: Scheme, scale: Tensor, n: int, k: int, row_nan: Tensor | None) -> dict[str, Tensor]:
    """Row scales [padded n], and block scales [panels, ceil(k / 128)] where the weight has them."""
    values = _scale_values(scale)
    rows = torch.zeros(-(-n // 16) * 16)
    factor = _FP8_TILE_FACTOR if scheme is Scheme.FP8 else 1.0
    blocks = (-(-n // 128), -(-k // 128))
    out: dict[str, Tensor] = {"row_scale": rows}
    if (
        values.numel() == n and values.shape[0] in (1, n) and (values.shape != blocks or scheme is Scheme.INT8)
    ) or values.numel() == 1:
        rows[:n] = values.flatten() * factor
    else:
        _require(
            scheme is Scheme.FP8 and tuple(values.shape) == blocks,
            f"scale of a {scheme.name} weight {(n, k)} must have 1 element, {n}, or shape {blocks}, "
            f"got {tuple(values.shape)}",
        )
        rows[:n] = factor
        panels = torch.arange(len(rows) // 16) * 16 // 128
        out["block_scale"] = values.index_select(0, panels).contiguous()
    if row_nan is not None:
        rows.masked_fill_(row_nan != 0, torch.nan)
    return out


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    invariant: bool = False,
    int8_activations: bool = False,
) -> Tensor:
    """x @ weight.T + bias, accumulated in float32 (int32 for int8 weights, whose rows of x are quantized here).

    Args:
        x: [m, k], float32, bfloat16 or float16, contiguous in the last dim, read-only.
        bias: [n], float32, bfloat16 or float16.
        out_dtype: Type of the result; that of x where None.
        out: [m, n] to write into, contiguous in the last dim.
        invariant: Whether a row's bits may not depend on m.
        int8_activations: Round x to int8, 32 values of a row to a scale; weights other than GGUF blocks ignore it.

    Returns:
        [m, n].
    """
    n, k = weight.shape
    _require(x.dim() == 2 and x.shape[1] == k and x.stride(1) == 1, f"x must be [m, {k}] rows, got {tuple(x.shape)}")
    if out is None:
        out = empty((x.shape[0], n), out_dtype or x.dtype)
    _require(tuple(out.shape) == (x.shape[0], n) and out.stride(1) == 1, f"out must be {(x.shape[0], n)} rows")
    bias_address, bias_dtype = 0, 0
    if bias is not None:
        _require(tuple(bias.shape) == (n,) and bias.is_contiguous(), f"bias must be [{n}], got {tuple(bias.shape)}")
        bias_address, bias_dtype = bias.data_ptr(), _dtype(bias, "bias")
    _kernels.linear(
        weight.handle,
        x.data_ptr(),
        _dtype(x, "x"),
        x.shape[0],
        x.stride(0),
        out.data_ptr(),
        _dtype(out, "out"),
        out.stride(0),
        bias_address,
        bias_dtype,
        invariant,
        int8_activations,
    )
    return out


def embed(
    token_ids: Tensor, weight: PackedWeight, *, out_dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
) -> Tensor:
    """Rows of a packed weight, dequantized and times `scale`: [t, k].

    Args:
        token_ids: [t], int32, each in [0, n): the caller has checked them.
    """
    ids = _int32(token_ids, "token_ids")
    out = empty((token_ids.shape[0], weight.shape[1]), out_dtype)
    _kernels.embed(weight.handle, ids, token_ids.shape[0], out.data_ptr(), _dtype(out, "out"), weight.shape[1], scale)
    return out


def dequantize(weight: PackedWeight) -> Tensor:
    """The whole weight: [n, k], float32."""
    out = torch.empty(weight.shape, dtype=torch.float32)
    _kernels.dequantize(weight.handle, out.data_ptr())
    return out


# -- cache and attention ---------------------------------------------------------------------------------------------


def kv_block_shapes(
    dtype: torch.dtype, num_kv_heads: int, head_dim: int, v_head_dim: int, block_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one block of the key plane and of the value plane (see csrc/kernels/kv.h)."""
    _require(block_size % BLOCK_MULTIPLE == 0, f"block_size must be a multiple of {BLOCK_MULTIPLE}, got {block_size}")
    _require(head_dim % 2 == 0, f"head_dim must be even, got {head_dim}")
    panels, v_panels = block_size // 16, -(-v_head_dim // 16)
    if dtype == torch.bfloat16:
        return (num_kv_heads, panels, head_dim // 2, 16, 2), (num_kv_heads, v_panels, block_size // 2, 16, 2)
    return (num_kv_heads, panels, head_dim, 16), (num_kv_heads, v_panels, block_size, 16)


class KvPlanes:
    """One layer's cache as the kernels see it.

    Args:
        key: [num_blocks, *key block shape] as `kv_block_shapes` says; blocks may lie apart, a block is contiguous.
        value: [num_blocks, *value block shape], as key.
        v_head_dim: Dimension of a value head (the plane pads it to a multiple of 16).
    """

    __slots__ = ("block_size", "dtype", "handle", "head_dim", "key", "num_kv_heads", "v_head_dim", "value")

    def __init__(self, key: Tensor, value: Tensor, v_head_dim: int) -> None:
        pair = 2 if key.dtype == torch.bfloat16 else 1
        self.key, self.value, self.dtype = key, value, key.dtype
        self.num_kv_heads, self.head_dim = key.shape[1], key.shape[3] * pair
        self.block_size, self.v_head_dim = key.shape[2] * 16, v_head_dim
        shapes = kv_block_shapes(key.dtype, self.num_kv_heads, self.head_dim, v_head_dim, self.block_size)
        ok = (tuple(key.shape[1:]), tuple(value.shape[1:])) == shapes and value.dtype == key.dtype
        _require(ok, f"planes of {tuple(key.shape)} and {tuple(value.shape)} are no cache of blocks {shapes}")
        _require(key[0].is_contiguous() and value[0].is_contiguous(), "a block must be contiguous")
        self.handle = _kernels.Cache(
            key.data_ptr(),
            value.data_ptr(),
            _dtype(key, "key plane"),
            key.stride(0),
            value.stride(0),
            self.num_kv_heads,
            self.head_dim,
            v_head_dim,
            self.block_size,
        )


def _heads(x: Tensor, name: str, heads: int, dim: int) -> tuple[int, int, int]:
    """(address, token stride, head stride) of [t, heads, dim]."""
    ok = x.dim() == 3 and tuple(x.shape[1:]) == (heads, dim) and x.stride(2) == 1
    _require(ok, f"{name} must be [t, {heads}, {dim}], contiguous in the last dim, got {tuple(x.shape)}")
    return x.data_ptr(), x.stride(0), x.stride(1)


def kv_write(key: Tensor, value: Tensor, planes: KvPlanes, slots: Tensor) -> None:
    """Stores token t in slot slots[t] (block * block_size + offset); -1 is written nowhere.

    Args:
        key: [>= t, num_kv_heads, head_dim], any strides in the first two dims, read-only.
        value: [>= t, num_kv_heads, v_head_dim], dtype of key.
        slots: [t], int32.
    """
    address = _int32(slots, "slots")
    key_parts = _heads(key, "key", planes.num_kv_heads, planes.head_dim)
    value_parts = _heads(value, "value", planes.num_kv_heads, planes.v_head_dim)
    _require(key.dtype == value.dtype, f"key is {key.dtype} and value {value.dtype}")
    _require(min(key.shape[0], value.shape[0]) >= slots.shape[0], "fewer tokens than slots")
    _kernels.kv_write(planes.handle, *key_parts, *value_parts, _dtype(key, "key"), slots.shape[0], address)


def kv_write_planned(key: Tensor, value: Tensor, planes: KvPlanes, handle: _kernels.Plan) -> None:
    """As `kv_write`, into the slots that the plan holds when the call runs; a tape reads them at each replay."""
    key_parts = _heads(key, "key", planes.num_kv_heads, planes.head_dim)
    value_parts = _heads(value, "value", planes.num_kv_heads, planes.v_head_dim)
    _require(key.dtype == value.dtype, f"key is {key.dtype} and value {value.dtype}")
    _kernels.kv_write_planned(planes.handle, *key_parts, *value_parts, _dtype(key, "key"), handle)


def kv_read(planes: KvPlanes, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [n, num_kv_heads, head_dim] and values of some slots, in the cache's dtype; zeros where a slot is -1."""
    address, count = _int32(slots, "slots"), slots.shape[0]
    key = empty((count, planes.num_kv_heads, planes.head_dim), planes.dtype)
    value = empty((count, planes.num_kv_heads, planes.v_head_dim), planes.dtype)
    _kernels.kv_read(planes.handle, key.data_ptr(), value.data_ptr(), count, address)
    return key, value


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies block a of `source` to block b of `target` for each pair; planes [num_blocks, ...], contiguous."""
    ok = source.is_contiguous() and target.is_contiguous() and source.shape[1:] == target.shape[1:]
    _require(ok and source.dtype == target.dtype, "planes must be contiguous and have blocks of one shape and dtype")
    for a, b in pairs:
        inside = 0 <= a < source.shape[0] and 0 <= b < target.shape[0]
        _require(inside, f"pair {(a, b)} is outside {source.shape[0]} and {target.shape[0]} blocks")
    block_bytes = source[0].numel() * source.element_size()
    _kernels.copy_blocks(source.data_ptr(), target.data_ptr(), block_bytes, list(pairs))


class AttentionKernel:
    """Attention with its static parameters. See `attention` and `attention_ragged` for the calls.

    Args:
        num_heads: Query heads.
        dtype: Type of query and output.
        scale: Factor of the logits.
        causal: Whether a query sees only keys up to its own position.
        window: Keys that a query sees, its own included; 0 sees all. Ignored where not causal.
        softcap: Logits become softcap * tanh(logits / softcap); 0 leaves them.
        split_keys: 0 splits long streams by what the threads need; positive splits always at multiples of it;
            negative never splits. Only with 0 may a row's bits depend on the batch and the number of threads.
    """

    __slots__ = ("dtype", "handle", "num_heads")

    def __init__(
        self,
        num_heads: int,
        dtype: torch.dtype,
        scale: float,
        *,
        causal: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        split_keys: int = 0,
    ) -> None:
        code = DTYPE_CODES[dtype]
        self.num_heads, self.dtype = num_heads, dtype
        self.handle = _kernels.Attention(num_heads, code, code, scale, causal, window, softcap, split_keys)

    def _extras(self, tokens: int, sinks: Tensor | None, lse: Tensor | None) -> tuple[int, int]:
        sinks_at = 0 if sinks is None else _float32(sinks, "sinks", (self.num_heads,))
        return sinks_at, 0 if lse is None else _float32(lse, "lse", (tokens, self.num_heads))

    def paged(
        self,
        query: Tensor,
        planes: KvPlanes,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of packed queries over the paged cache; see `attention`."""
        tokens, requests = query.shape[0], seq_lens.shape[0]
        parts = _heads(query, "query", self.num_heads, planes.head_dim)
        _require(query.dtype == self.dtype, f"query must be {self.dtype}, got {query.dtype}")
        starts, lens = _int32(query_start_loc, "query_start_loc"), _int32(seq_lens, "seq_lens")
        table = _int32(block_table, "block_table", 2)
        _require(query_start_loc.shape[0] == requests + 1, "query_start_loc must have one entry more than seq_lens")
        _require(block_table.shape[0] >= requests, "block_table must have a row for each request")
        if out is None:
            out = empty((tokens, self.num_heads, planes.v_head_dim), self.dtype)
        out_parts = _heads(out, "out", self.num_heads, planes.v_head_dim)
        extras = self._extras(tokens, sinks, lse)
        self.handle.paged(
            planes.handle, *parts, *out_parts, requests, starts, lens, table, block_table.stride(0), *extras
        )
        return out

    def ragged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of packed queries over packed keys; see `attention_ragged`."""
        tokens, (kv_heads, head_dim), v_dim = query.shape[0], key.shape[1:], value.shape[2]
        _require(query.dtype == key.dtype == value.dtype == self.dtype, f"query, key and value must be {self.dtype}")
        _require(head_dim % 2 == 0, f"head_dim must be even, got {head_dim}")
        query_parts = _heads(query, "query", self.num_heads, head_dim)
        key_parts, value_parts = _heads(key, "key", kv_heads, head_dim), _heads(value, "value", kv_heads, v_dim)
        starts, key_starts = _int32(query_start_loc, "query_start_loc"), _int32(key_start_loc, "key_start_loc")
        _require(query_start_loc.shape == key_start_loc.shape, "both start_loc must have one entry a request and one")
        if out is None:
            out = empty((tokens, self.num_heads, v_dim), self.dtype)
        out_parts = _heads(out, "out", self.num_heads, v_dim)
        extras = self._extras(tokens, sinks, lse)
        requests = query_start_loc.shape[0] - 1
        self.handle.ragged(
            kv_heads, head_dim, v_dim, *query_parts, *key_parts, *value_parts, *out_parts, requests, starts, key_starts,
            *extras,
        )  # fmt: skip
        return out


def attention(
    query: Tensor,
    planes: KvPlanes,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    split_keys: int = 0,
) -> Tensor:
    """Softmax attention over the paged cache, for prefill, chunk, decode and mixed batches.

    Query i of request r stands at position seq_len - query_len + i. Blocks past seq_len, blocks out of the window
    and the null block 0 are not read.

    Args:
        query: [t, num_heads, head_dim], contiguous in the last dim, read-only.
        query_start_loc: [r + 1], int32.
        seq_lens: [r], int32: keys of each request, those of this step included.
        block_table: [>= r, max_blocks], int32.
        sinks: [num_heads], float32: a logit for each head that joins the denominator alone.
        lse: [t, num_heads], float32, written: natural log of the sum of exponentials, sinks included.

    Returns:
        [t, num_heads, v_head_dim], dtype of query.
    """
    kernel = AttentionKernel(
        query.shape[1], query.dtype, scale, causal=causal, window=window, softcap=softcap, split_keys=split_keys
    )
    return kernel.paged(query, planes, query_start_loc, seq_lens, block_table, sinks=sinks, lse=lse)


def attention_ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    split_keys: int = 0,
) -> Tensor:
    """As `attention`, with keys and values packed like the queries instead of cached.

    Args:
        key: [tk, num_kv_heads, head_dim]; request r owns rows [key_start_loc[r], key_start_loc[r + 1]).
        value: [tk, num_kv_heads, v_head_dim].
        key_start_loc: [r + 1], int32.
    """
    kernel = AttentionKernel(
        query.shape[1], query.dtype, scale, causal=causal, window=window, softcap=softcap, split_keys=split_keys
    )
    return kernel.ragged(query, key, value, query_start_loc, key_start_loc, sinks=sinks, lse=lse)


# -- rows ------------------------------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim, in float32.

    Args:
        x: [t, dim] or [t, heads, dim], any strides but contiguous in the last dim.
        weight: [dim], any float type.
        residual: [t, dim], dtype of x: becomes x + residual, rounded, and that sum is normed.
        out: Where to write, shaped as x; may be x.
    """
    _require(x.dim() in (2, 3) and x.stride(-1) == 1, f"x must be [t, dim] or [t, heads, dim], got {tuple(x.shape)}")
    dim, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    _require(tuple(weight.shape) == (dim,) and weight.is_contiguous(), f"weight must be [{dim}], contiguous")
    if out is None:
        out = empty(x.shape, x.dtype)
    _require(out.shape == x.shape and out.dtype == x.dtype and out.stride(-1) == 1, "out must be shaped as x")
    residual_at, residual_stride = 0, 0
    if residual is not None:
        ok = x.dim() == 2 and residual.shape == x.shape and residual.dtype == x.dtype and residual.stride(1) == 1
        _require(ok, f"residual must be {tuple(x.shape)} {x.dtype}")
        residual_at, residual_stride = residual.data_ptr(), residual.stride(0)
    _kernels.rms_norm(
        x.data_ptr(),
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        out.data_ptr(),
        out.stride(0),
        out.stride(1) if x.dim() == 3 else 0,
        weight.data_ptr(),
        _dtype(x, "x"),
        _dtype(weight, "weight"),
        x.shape[0],
        heads,
        dim,
        eps,
        offset,
        residual_at,
        residual_stride,
        residual_at,
        residual_stride,
    )
    return out


def act_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """activation(x[:, :size]) * x[:, size:] in float32: [t, size] from [t, 2 * size]."""
    ok = x.dim() == 2 and x.shape[1] % 2 == 0 and x.stride(1) == 1
    _require(ok, f"x must be [t, 2 * size], contiguous in the last dim, got {tuple(x.shape)}")
    size = x.shape[1] // 2
    out = empty((x.shape[0], size), x.dtype)
    code = ACTIVATIONS[activation]
    _kernels.act_mul(x.data_ptr(), x.stride(0), size, out.data_ptr(), size, _dtype(x, "x"), code, x.shape[0], size)
    return out


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False) -> None:
    """Rotates the first rotary_dim elements of each head, in place, in float32.

    Args:
        x: [t, heads, head_dim], any strides in the first two dims; overwritten.
        positions: [t], int32.
        cos_sin: [max_position, rotary_dim], float32: cosines, then sines.
    """
    rotary_dim = cos_sin.shape[1]
    _require(rotary_dim % 2 == 0 and rotary_dim <= x.shape[2], f"rotary_dim {rotary_dim} does not fit {x.shape[2]}")
    address, stride, head_stride = _heads(x, "x", x.shape[1], x.shape[2])
    table = _float32(cos_sin, "cos_sin", (cos_sin.shape[0], rotary_dim))
    at = _int32(positions, "positions")
    _require(positions.shape[0] == x.shape[0], f"{positions.shape[0]} positions for {x.shape[0]} tokens")
    _kernels.rope(
        address, stride, head_stride, _dtype(x, "x"), x.shape[0], x.shape[1], rotary_dim, interleaved, at, table
    )


# -- tokens ----------------------------------------------------------------------------------------------------------


def sample(
    logits: Tensor,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """One token a row, [r], int32: the most likely one, or drawn by the Gumbel trick from what the filters keep.

    Args:
        logits: [r, vocab], float32, contiguous in the last dim, read-only.
        temperature: [r], float32; None or 0 takes the most likely token (lowest id among equals).
        seeds: [r], int64: Philox keys. positions: [r], int32: Philox counters. Both needed with a temperature.
        top_k: [r], int32; 0 keeps all. top_p: [r], float32; 1 keeps all. min_p: [r], float32; 0 keeps all.
    """
    rows, vocab = logits.shape
    _require(logits.dtype == torch.float32 and logits.stride(1) == 1 and vocab > 0, "logits must be float32 rows")
    out = empty((rows,), torch.int32)
    if temperature is None:
        _kernels.sample(logits.data_ptr(), rows, vocab, logits.stride(0), out.data_ptr())
        return out
    _require(seeds is not None and positions is not None, "drawing needs seeds and positions")
    assert seeds is not None and positions is not None
    _require(seeds.dtype == torch.int64 and seeds.shape == (rows,) and seeds.is_contiguous(), "seeds must be int64 [r]")
    _require(positions.shape == (rows,), "positions must be [r]")
    _kernels.sample(
        logits.data_ptr(),
        rows,
        vocab,
        logits.stride(0),
        out.data_ptr(),
        _float32(temperature, "temperature", (rows,)),
        seeds.data_ptr(),
        _int32(positions, "positions"),
        0 if top_k is None else _int32(top_k, "top_k"),
        0 if top_p is None else _float32(top_p, "top_p", (rows,)),
        0 if min_p is None else _float32(min_p, "min_p", (rows,)),
    )
    return out


def token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Sets logits whose bit (v % 32 of word v // 32) is 0 to -inf, in place.

    Args:
        logits: [r, vocab], float32. bitmask: [r, >= ceil(vocab / 32)], int32.
    """
    rows, vocab = logits.shape
    _require(logits.dtype == torch.float32 and logits.stride(1) == 1, "logits must be float32 rows")
    mask = _int32(bitmask, "bitmask", 2)
    _require(bitmask.shape[0] == rows and bitmask.shape[1] * 32 >= vocab, f"bitmask does not cover {(rows, vocab)}")
    _kernels.token_bitmask(logits.data_ptr(), rows, vocab, logits.stride(0), mask, bitmask.stride(0))

"""Kernels over raw addresses. Sizes and strides are in elements, addresses 0 where absent; nothing is checked."""

from collections.abc import Sequence

class Weight:
    def __init__(
        self,
        scheme: int,
        n: int,
        k: int,
        data: int,
        row_scale: int = 0,
        block_scale: int = 0,
        row_sum: int = 0,
    ) -> None: ...

class Cache:
    def __init__(
        self,
        k: int,
        v: int,
        dtype: int,
        k_block_stride: int,
        v_block_stride: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        block_size: int,
    ) -> None: ...

class Plan:
    def __init__(self) -> None: ...
    def set(
        self,
        num_requests: int,
        query_start_loc: int,
        seq_lens: int,
        block_table: int,
        table_stride: int,
        slots: int,
        num_slots: int,
        num_tokens: int,
        num_valid_tokens: int,
    ) -> None: ...

class Tape:
    def __init__(self) -> None: ...
    def record(self, plan: Plan | None) -> None: ...
    def stop(self) -> None: ...
    def replay(self) -> None: ...
    def profile(self) -> list[tuple[str, float]]: ...
    def __len__(self) -> int: ...

class Attention:
    def __init__(
        self,
        num_heads: int,
        dtype: int,
        out_dtype: int,
        scale: float,
        causal: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        split_keys: int = 0,
        int16: bool = False,
    ) -> None: ...
    def paged(
        self,
        cache: Cache,
        query: int,
        query_stride: int,
        query_head_stride: int,
        out: int,
        out_stride: int,
        out_head_stride: int,
        num_requests: int,
        query_start_loc: int,
        seq_lens: int,
        block_table: int,
        table_stride: int,
        sinks: int = 0,
        lse: int = 0,
    ) -> None: ...
    def planned(
        self,
        cache: Cache,
        query: int,
        query_stride: int,
        query_head_stride: int,
        out: int,
        out_stride: int,
        out_head_stride: int,
        plan: Plan,
        sinks: int = 0,
        lse: int = 0,
    ) -> None: ...
    def ragged(
        self,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        query: int,
        query_stride: int,
        query_head_stride: int,
        key: int,
        key_stride: int,
        key_head_stride: int,
        value: int,
        value_stride: int,
        value_head_stride: int,
        out: int,
        out_stride: int,
        out_head_stride: int,
        num_requests: int,
        query_start_loc: int,
        key_start_loc: int,
        sinks: int = 0,
        lse: int = 0,
    ) -> None: ...

def isa() -> str: ...
def isa_levels() -> list[str]: ...
def rounds_attention() -> bool: ...
def set_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def advise_huge_pages(memory: int, bytes: int) -> None: ...
def packed_bytes(scheme: int, n: int, k: int) -> int: ...
def pack(
    scheme: int,
    n: int,
    k: int,
    source: int,
    row_stride: int,
    source_dtype: int,
    out: int,
    row_sum: int = 0,
    row_nan: int = 0,
) -> None: ...
def linear(
    weight: Weight,
    x: int,
    x_dtype: int,
    m: int,
    x_stride: int,
    y: int,
    y_dtype: int,
    y_stride: int,
    bias: int = 0,
    bias_dtype: int = 0,
    invariant: bool = False,
    int8_activations: bool = False,
) -> None: ...
def embed(
    weight: Weight, ids: int, count: int, out: int, out_dtype: int, out_stride: int, scale: float = 1.0
) -> None: ...
def dequantize(weight: Weight, out: int) -> None: ...
def kv_write(
    cache: Cache,
    key: int,
    key_stride: int,
    key_head_stride: int,
    value: int,
    value_stride: int,
    value_head_stride: int,
    dtype: int,
    num_tokens: int,
    slots: int,
) -> None: ...
def kv_write_planned(
    cache: Cache,
    key: int,
    key_stride: int,
    key_head_stride: int,
    value: int,
    value_stride: int,
    value_head_stride: int,
    dtype: int,
    plan: Plan,
) -> None: ...
def kv_read(cache: Cache, key: int, value: int, count: int, slots: int) -> None: ...
def copy_blocks(source: int, target: int, block_bytes: int, pairs: Sequence[tuple[int, int]]) -> None: ...
def rms_norm(
    x: int,
    x_stride: int,
    x_head_stride: int,
    out: int,
    out_stride: int,
    out_head_stride: int,
    weight: int,
    dtype: int,
    weight_dtype: int,
    rows: int,
    heads: int,
    dim: int,
    eps: float,
    offset: float = 0.0,
    residual: int = 0,
    residual_stride: int = 0,
    residual_out: int = 0,
    residual_out_stride: int = 0,
) -> None: ...
def qk_norm_rope_write(
    cache: Cache,
    query: int,
    query_stride: int,
    query_head_stride: int,
    num_heads: int,
    key: int,
    key_stride: int,
    key_head_stride: int,
    value: int,
    value_stride: int,
    value_head_stride: int,
    dtype: int,
    num_tokens: int,
    q_weight: int,
    k_weight: int,
    weight_dtype: int,
    eps: float,
    offset: float,
    rotary_dim: int,
    interleaved: bool,
    positions: int,
    cos_sin: int,
    plan: Plan,
    /,
) -> None: ...
def act_mul(
    x: int,
    x_stride: int,
    up_offset: int,
    out: int,
    out_stride: int,
    dtype: int,
    activation: int,
    rows: int,
    dim: int,
) -> None: ...
def rope(
    x: int,
    stride: int,
    head_stride: int,
    dtype: int,
    num_tokens: int,
    heads: int,
    rotary_dim: int,
    interleaved: bool,
    positions: int,
    cos_sin: int,
) -> None: ...
def sample(
    logits: int,
    rows: int,
    vocab: int,
    stride: int,
    out: int,
    temperature: int = 0,
    seeds: int = 0,
    positions: int = 0,
    top_k: int = 0,
    top_p: int = 0,
    min_p: int = 0,
) -> None: ...
def token_bitmask(logits: int, rows: int, vocab: int, stride: int, mask: int, mask_stride: int) -> None: ...

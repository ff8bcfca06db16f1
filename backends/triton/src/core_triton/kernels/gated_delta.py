"""The gated delta rule: token by token for short queries, sixteen tokens at a time for long ones."""

import triton
import triton.language as tl

from core_triton.kernels.states import source_slot, target_slots

__all__ = ["gated_delta_chunk_kernel", "gated_delta_kernel"]


@triton.jit
def gated_delta_kernel(
    query,
    key,
    value,
    gate,
    beta,
    plane,
    out,
    starts,
    state_slots,
    num_accepted,
    checkpoints,
    num_slots,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    g_stride,
    b_stride,
    slot_stride,
    head_stride,
    row_stride,
    table_stride,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    NORM: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (requests, value heads, blocks of BLOCK_V values); `out` is contiguous, [tokens, value heads, V_DIM].

    A program keeps its columns of the state to itself: no other one reads or writes them.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    heads, key_head = tl.num_programs(1), head // GROUP
    rows, columns = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = rows < K_DIM, columns < V_DIM
    both = k_mask[:, None] & v_mask[None, :]
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    if count <= 0:
        return
    source = source_slot(state_slots, num_accepted, request, table_stride)
    part = plane + head * head_stride + (rows * row_stride)[:, None] + columns[None, :]
    state = tl.load(part + source * slot_stride, mask=both & (source > 0), other=0.0).to(tl.float32)
    for index in range(count):
        token = (start + index).to(tl.int64)
        q = tl.load(query + token * q_stride + key_head * q_head_stride + rows, mask=k_mask, other=0.0).to(tl.float32)
        k = tl.load(key + token * k_stride + key_head * k_head_stride + rows, mask=k_mask, other=0.0).to(tl.float32)
        v = tl.load(value + token * v_stride + head * v_head_stride + columns, mask=v_mask, other=0.0).to(tl.float32)
        if NORM:
            q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        decay = tl.exp(tl.load(gate + token * g_stride + head))
        strength = tl.load(beta + token * b_stride + head)
        state = state * decay
        error = (v - tl.sum(state * k[:, None], 0)) * strength
        state = state + k[:, None] * error[None, :]
        mixed = tl.sum(state * (q * scale)[:, None], 0)
        tl.store(out + (token * heads + head) * V_DIM + columns, mixed.to(out.dtype.element_ty), mask=v_mask)
        slot, checkpoint = target_slots(
            state_slots, checkpoints, request, table_stride, num_slots, index, count, CHECKPOINTS
        )
        kept = state.to(plane.dtype.element_ty)
        tl.store(part + slot * slot_stride, kept, mask=both & (slot > 0))
        tl.store(part + checkpoint * slot_stride, kept, mask=both & (checkpoint > 0))


@triton.jit
def _heads(x, at, inside, NORM: tl.constexpr):
    """[PIECES, CHUNK, BLOCK_K], float32, each token's PIECES * BLOCK_K elements of length one where NORM."""
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        values = values * tl.rsqrt(tl.sum(tl.sum(values * values, 2), 0) + 1e-6)[None, :, None]
    return values


@triton.jit
def gated_delta_chunk_kernel(
    query,
    key,
    value,
    gate,
    beta,
    plane,
    out,
    starts,
    state_slots,
    num_accepted,
    checkpoints,
    num_slots,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    g_stride,
    b_stride,
    slot_stride,
    head_stride,
    row_stride,
    table_stride,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    NORM: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """As `gated_delta_kernel`, for requests with more tokens than slots, of which the end state alone is kept.

    With G_i the sum of the chunk's gates up to token i and S the state before the chunk, the updates u_i obey
    u_i + beta_i sum over j < i of exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i),
    a triangular system, which is solved row by row: its inverse as a product of powers would cancel badly.

    Keys and state lie as pieces, [pieces, PIECE of the key's elements, ...], and products are batched over them and
    summed: without a matrix unit for float32, one product over the whole key would hold all of it in registers.
    """
    PIECES: tl.constexpr = BLOCK_K // PIECE
    request, head = tl.program_id(0), tl.program_id(1)
    heads, key_head = tl.num_programs(1), head // GROUP
    rows = (tl.arange(0, PIECES) * PIECE)[:, None, None] + tl.arange(0, PIECE)[None, :, None]
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    v_mask = columns < V_DIM
    both = (rows < K_DIM) & v_mask[None, None, :]
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    if count <= 0:
        return
    source = source_slot(state_slots, num_accepted, request, table_stride)
    part = plane + head * head_stride + rows * row_stride + columns[None, None, :]
    state = tl.load(part + source * slot_stride, mask=both & (source > 0), other=0.0).to(tl.float32)
    steps = tl.arange(0, CHUNK)
    dims = (tl.arange(0, PIECES) * PIECE)[:, None, None] + tl.arange(0, PIECE)[None, None, :]
    later = steps[:, None] > steps[None, :]
    for begin in range(0, count, CHUNK):
        mask = begin + steps < count
        tokens = (start + begin + steps).to(tl.int64)
        inside = mask[None, :, None] & (dims < K_DIM)
        k = _heads(key + key_head * k_head_stride, (tokens * k_stride)[None, :, None] + dims, inside, NORM)
        v = tl.load(
            value + (tokens * v_stride)[:, None] + head * v_head_stride + columns[None, :],
            mask=mask[:, None] & v_mask[None, :],
            other=0.0,
        ).to(tl.float32)
        # Steps past the end have no gate and no strength: they change nothing.
        sums = tl.cumsum(tl.load(gate + tokens * g_stride + head, mask=mask, other=0.0), 0)
        strength = tl.load(beta + tokens * b_stride + head, mask=mask, other=0.0)
        between = tl.exp(tl.where(later | (steps[:, None] == steps[None, :]), sums[:, None] - sums[None, :], 0.0))
        decayed = tl.exp(sums)

        turned = tl.permute(k, (0, 2, 1))
        coupling = tl.sum(tl.dot(k, turned, input_precision="ieee"), 0) * between * strength[:, None]
        coupling = tl.where(later, coupling, 0.0)
        updates = v - tl.sum(tl.dot(k, state, input_precision="ieee"), 0) * decayed[:, None]
        updates = updates * strength[:, None]
        for step in range(1, CHUNK):
            # Row `step` of the coupling times the rows that are solved already.
            factors = tl.sum(tl.where(steps[:, None] == step, coupling, 0.0), 0)
            known = tl.sum(factors[:, None] * updates, 0)
            updates = updates - tl.where(steps[:, None] == step, known[None, :], 0.0)

        q = _heads(query + key_head * q_head_stride, (tokens * q_stride)[None, :, None] + dims, inside, NORM) * scale
        scores = tl.sum(tl.dot(q, turned, input_precision="ieee"), 0) * between
        scores = tl.where(steps[:, None] >= steps[None, :], scores, 0.0)
        mixed = tl.sum(tl.dot(q, state, input_precision="ieee"), 0) * decayed[:, None]
        mixed += tl.dot(scores, updates, input_precision="ieee")
        tl.store(
            out + ((tokens * heads + head) * V_DIM)[:, None] + columns[None, :],
            mixed.to(out.dtype.element_ty),
            mask=mask[:, None] & v_mask[None, :],
        )
        whole = tl.sum(tl.where(steps == CHUNK - 1, sums, 0.0), 0)
        remaining = tl.exp(whole - sums)
        spread = tl.broadcast_to(updates[None, :, :], (PIECES, CHUNK, BLOCK_V))
        added = tl.dot(turned * remaining[None, None, :], spread, input_precision="ieee")
        state = state * tl.exp(whole) + added
    slot, checkpoint = target_slots(
        state_slots, checkpoints, request, table_stride, num_slots, count - 1, count, CHECKPOINTS
    )
    kept = state.to(plane.dtype.element_ty)
    tl.store(part + slot * slot_stride, kept, mask=both & (slot > 0))
    tl.store(part + checkpoint * slot_stride, kept, mask=both & (checkpoint > 0))

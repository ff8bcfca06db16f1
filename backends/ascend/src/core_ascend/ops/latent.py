"""Latent attention of DeepSeek models: the prolog, dense and sparse attention, and the index that feeds the latter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.backend.ops import IndexTopkArgs, IndexTopkOp, MlaArgs, MlaOp, MlaPrologArgs, MlaPrologOp
from core_ascend.launches import note
from core_ascend.ops.attention import CAUSAL, UNMASKED
from core_ascend.ops.cache import plain_store, write
from core_ascend.ops.dense import make_rotation
from core_ascend.plan import AscendPlan, causal_mask
from core_ascend.vendor import npu
from core_ascend.weights import AscendPacked

__all__ = ["index_topk", "mla", "mla_prolog"]

_SPLIT_PARTS = 2
"""Attention mode in which latent and rotated part lie apart."""


def mla(op: MlaOp) -> Callable[[MlaArgs], Tensor]:
    """Attention of all heads over one latent."""
    return _sparse(op) if op.has("sparse") else _dense(op)


def _dense(op: MlaOp) -> Callable[[MlaArgs], Tensor]:
    """Pieces of at most 16 queries, which is what the call takes of a request; the cut is exact."""
    vendor = npu()
    heads = 1 << (op.num_heads - 1).bit_length()

    def run(args: MlaArgs) -> Tensor:
        plan = args.plan
        assert isinstance(plan, AscendPlan) and plan.piece_table is not None
        if not len(args.q_latent):
            return torch.empty_like(args.q_latent)
        latent, turned = (_filled_up(x, heads) for x in (args.q_latent, args.q_rope))
        several = any(b - a > 1 for a, b in zip([0, *plan.piece_ends[:-1]], plan.piece_ends, strict=True))
        note(lambda: {"actual_seq_qlen": plan.piece_ends, "actual_seq_kvlen": plan.piece_lens})
        out, lse = vendor.npu_fused_infer_attention_score_v2(
            latent,
            args.cache[0],
            args.cache[0],
            query_rope=turned,
            key_rope=args.cache[1],
            num_query_heads=heads,
            num_key_value_heads=1,
            input_layout="TND",
            atten_mask=causal_mask(latent.device) if several else None,
            sparse_mode=CAUSAL if several else UNMASKED,
            softmax_scale=op.scale,
            block_table=plan.piece_table,
            block_size=plan.block_size,
            actual_seq_qlen=plan.piece_ends,
            actual_seq_kvlen=plan.piece_lens,
            return_softmax_lse=args.lse is not None,
        )
        if args.lse is not None:
            args.lse.copy_(lse.view(-1, heads)[:, : op.num_heads])
        return _without_padding(plan, out[:, : op.num_heads])

    return run


def _filled_up(x: Tensor, heads: int) -> Tensor:
    missing = heads - x.shape[1]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()


def _without_padding(plan: AscendPlan, out: Tensor) -> Tensor:
    if plan.maybe_padded and plan.padding is not None:
        return out.masked_fill(plan.padding, 0.0)
    return out.contiguous()


def _sparse(op: MlaOp) -> Callable[[MlaArgs], Tensor]:
    vendor = npu()

    def run(args: MlaArgs) -> Tensor:
        plan = args.plan
        assert isinstance(plan, AscendPlan) and args.indices is not None
        if not len(args.q_latent):
            return torch.empty_like(args.q_latent)
        out = vendor.npu_sparse_flash_attention(
            args.q_latent.contiguous(),
            args.cache[0],
            args.cache[0],
            args.indices[:, None].contiguous(),
            op.scale,
            block_table=plan.block_table,
            actual_seq_lengths_query=plan.query_start_loc[1:].contiguous(),
            actual_seq_lengths_kv=plan.seq_lens,
            query_rope=args.q_rope.contiguous(),
            key_rope=args.cache[1],
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=CAUSAL,
            attention_mode=_SPLIT_PARTS,
        )[0]
        return _without_padding(plan, out)

    return run


def index_topk(op: IndexTopkOp) -> Callable[[IndexTopkArgs], Tensor]:
    """`npu_lightning_indexer`; the weights of the heads are rounded to the model's type, as it takes no other."""
    vendor = npu()

    def run(args: IndexTopkArgs) -> Tensor:
        plan, query = args.plan, args.query.contiguous()
        if not len(query):
            return torch.empty(0, op.top_k, dtype=torch.int32, device=query.device)
        found, _ = vendor.npu_lightning_indexer(
            query,
            args.cache[0],
            args.weights.to(query.dtype).contiguous(),
            actual_seq_lengths_query=plan.query_start_loc[1:].contiguous(),
            actual_seq_lengths_key=plan.seq_lens,
            block_table=plan.block_table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=op.top_k,
            sparse_mode=CAUSAL,
        )
        chosen: Tensor = found[:, 0]
        return chosen

    return run


def mla_prolog(op: MlaPrologOp) -> Callable[[MlaPrologArgs], tuple[Tensor, Tensor]]:
    """Norm, rotation, cache write, and the key up-projection in one transposed product."""
    vendor, store = npu(), plain_store()
    rotate = make_rotation(op.rope_dim, op.interleaved)

    def run(args: MlaPrologArgs) -> tuple[Tensor, Tensor]:
        assert isinstance(args.plan, AscendPlan)
        latent, key = args.kv.split((op.latent_dim, op.rope_dim), dim=-1)
        latent = vendor.npu_rms_norm(latent.contiguous(), args.kv_weight, epsilon=op.eps)[0]
        nope, turned = args.q.split((op.nope_dim, op.rope_dim), dim=-1)
        turned, key = rotate((turned, key[:, None]), args.positions, args.cos_sin)
        write(store, args.plan, (latent[:, None], key), args.cache)
        absorbed: Tensor = vendor.npu_transpose_batchmatmul(
            nope.contiguous(), _up(args.k_up), perm_x1=(1, 0, 2), perm_y=(1, 0, 2)
        )
        return absorbed, turned

    return run


def _up(weight: object) -> Tensor:
    """[heads, nope_dim, latent_dim], plain."""
    assert isinstance(weight, AscendPacked) and weight.scheme == "none" and not weight.fractal
    return weight.tensors()["weight"]

"""What the calls take, asked of an operation's static parameters: pure, without torch_npu and without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.backend import Capture, Kind, Lens, Verdict
from core.backend.ops import (
    ActMulOp,
    AttentionOp,
    EmbedOp,
    ExpertsOp,
    ExportBlocksOp,
    GatedDeltaOp,
    ImportBlocksOp,
    IndexTopkOp,
    KvWriteOp,
    LinearOp,
    MlaOp,
    MlaPrologOp,
    MoveTokensOp,
    OpSpec,
    ReduceNormOp,
    RmsNormOp,
    RopeOp,
    RouteOp,
)
from core.spec import DType
from core_ascend.chips import Chip
from core_ascend.layouts import fractal_cache, latent_cache
from core_ascend.limits import (
    DELTA_DIM,
    FP8_TYPES,
    HEAD_MULTIPLE,
    INDEX_COUNTS,
    INDEX_DIM,
    INT4_ROWS,
    MAX_DELTA_HEADS,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEAD_RATIO,
    MAX_INDEX_HEADS,
    MAX_INNER,
    MAX_LATENT_HEADS,
    MAX_PIECE,
    MAX_ROTARY_DIM,
    MAX_ROTARY_HEADS,
    MAX_SINK_DIM,
    ROW_BYTES,
)

__all__ = ["verdict"]


def verdict(op: OpSpec, chip: Chip) -> Verdict:
    """How a chip does an operation."""
    absent = _ABSENT.get(op.name)
    if absent:
        return Verdict.composite(absent)
    rule = _RULES.get(type(op))
    if rule is None:
        return Verdict.composite("torch_npu has no call for it")
    return rule(op, chip)


def _native_or(reason: str, **kwargs: Any) -> Verdict:
    return Verdict.composite(reason) if reason else Verdict.native(**kwargs)


def _types(op: OpSpec, chip: Chip, *, wide: bool = True) -> str:
    """Why the chip does not compute in the type of `op`; `wide`: whether float32 will do."""
    known = chip.float_types if wide else chip.halves
    if op.dtype in known:
        return ""
    return f"on {chip.family} it computes in {', '.join(sorted(known))}, not in {op.dtype.value}"


def _attention(op: AttentionOp, chip: Chip) -> Verdict:
    if op.kv_dtype in FP8_TYPES:
        return Verdict.no(f"{chip.family} has no FP8 unit: keep the cache in the model's type")
    private = fractal_cache(chip, op.head_dim, op.v_head_dim, op.kv_dtype) and not op.has("ragged")
    reason = _attention_reason(op, chip)
    if reason:
        # Composites cannot read fractals.
        return Verdict.no(reason) if private else Verdict.composite(reason)
    if private:
        return Verdict.native(lens=Lens.HOST_EXACT, max_decode_q=MAX_PIECE, capture=Capture.NEVER)
    return Verdict.native(lens=Lens.HOST_EXACT, max_decode_q=MAX_PIECE, capture=Capture.UNIFORM)


def _attention_reason(op: AttentionOp, chip: Chip) -> str:
    if op.softcap:
        return "the attention call has no softcap"
    if op.has("scales"):
        return "the paged attention call takes no scales of keys and values"
    types = _types(op, chip, wide=False)
    if types:
        return types
    if op.kv_dtype is not op.dtype and not op.has("ragged"):
        return f"the cache is {op.kv_dtype.value} and queries are {op.dtype.value}; the call takes one type"
    if not op.num_kv_heads or op.num_heads // op.num_kv_heads > MAX_HEAD_RATIO:
        return f"at most {MAX_HEAD_RATIO} query heads share a key head"
    if op.head_dim != op.v_head_dim:
        return "keys and values have heads of different widths"
    if op.head_dim % HEAD_MULTIPLE or op.head_dim > MAX_HEAD_DIM:
        return f"heads are multiples of {HEAD_MULTIPLE}, at most {MAX_HEAD_DIM} wide; these have {op.head_dim}"
    if not chip.fused_attention:
        return _old_attention_reason(op, chip)
    if op.has("sinks"):
        if op.has("lse"):
            return "what the call returns as log-sum-exp beside sinks is not documented"
        if op.v_head_dim > MAX_SINK_DIM:
            return f"sinks take heads of at most {MAX_SINK_DIM}"
    return ""


def _old_attention_reason(op: AttentionOp, chip: Chip) -> str:
    if op.features:
        return f"the attention call of {chip.family} has no {', '.join(sorted(op.features))}"
    if not op.causal:
        return f"the paged attention call of {chip.family} is causal"
    return ""


def _kv_write(op: KvWriteOp, chip: Chip) -> Verdict:
    if op.features:
        return Verdict.composite("the write call applies no scales")
    if op.kv_dtype is not op.dtype:
        return Verdict.composite(f"the write call stores {op.dtype.value} as it is, not as {op.kv_dtype.value}")
    if not op.v_head_dim:
        latent = latent_cache(chip, op.head_dim, op.kv_dtype)
        return _native_or("" if latent else "the write call takes a key and a value")
    if chip.fractal_cache:
        fractal = fractal_cache(chip, op.head_dim, op.v_head_dim, op.kv_dtype)
        return _native_or("" if fractal else f"the write call of {chip.family} stores fractals of 16-bit heads")
    for width in (op.head_dim, op.v_head_dim):
        if width * op.kv_dtype.itemsize % ROW_BYTES:
            return Verdict.composite(f"the write call stores heads of a multiple of {ROW_BYTES} bytes")
    return _native_or(_types(op, chip))


def _linear(op: LinearOp, chip: Chip) -> Verdict:
    if op.scheme in ("fp8_channel", "fp8_tensor", "fp8_block"):
        reason = f"{chip.family} has no FP8 unit"
        if op.scheme == "fp8_channel":
            return Verdict.no(f"{reason}: use --quantization int8, or none")
        return Verdict.composite(f"{reason}: such weights are made dense at load")
    if op.scheme == "int8":
        return _int8(op, chip)
    if op.scheme == "int4_group":
        return _int4(op, chip)
    if op.scheme != "none":
        return Verdict.composite(f"torch_npu has no product with {op.scheme} weights")
    if op.weight_dtype is not op.dtype:
        return Verdict.composite(
            f"rows are {op.dtype.value} and weights {op.weight_dtype.value}; the unit takes one type"
        )
    if op.out_dtype not in chip.float_types:
        return Verdict.composite(f"{chip.family} has no {op.out_dtype.value}")
    return _native_or(_types(op, chip))


def _int8(op: LinearOp, chip: Chip) -> Verdict:
    if not chip.row_scales:
        return Verdict.composite(f"the int8 product of {chip.family} takes no scale for each row of activations")
    reason = _types(op, chip, wide=False)
    if not reason and op.out_dtype is not op.dtype:
        reason = f"the int8 product gives {op.dtype.value}, not {op.out_dtype.value}"
    if not reason and op.in_features > MAX_INNER:
        reason = f"the int8 product takes at most {MAX_INNER} columns"
    return _native_or(reason, input_format="int8_row")


def _int4(op: LinearOp, chip: Chip) -> Verdict:
    if not chip.row_scales:
        return Verdict.composite(f"{chip.family} has no product with groups of 4-bit weights")
    reason = _types(op, chip, wide=False)
    if not reason and op.dtype is DType.BFLOAT16:
        reason = "the product with 4-bit weights would round their scales to bfloat16: use --dtype float16"
    if not reason and max(op.in_features, op.out_features) > MAX_INNER:
        reason = f"the product with 4-bit weights takes at most {MAX_INNER} rows and columns"
    if not reason and op.out_features % INT4_ROWS:
        reason = f"the product with 4-bit weights takes a multiple of {INT4_ROWS} rows"
    return _native_or(reason)


def _embed(op: EmbedOp, chip: Chip) -> Verdict:
    if op.scheme != "none":
        return Verdict.composite(f"rows of {op.scheme} are dequantized by the core")
    return _native_or(_types(op, chip))


def _rms_norm(op: RmsNormOp, chip: Chip) -> Verdict:
    if op.weight_offset not in (0.0, 1.0):
        return Verdict.composite("the norm calls add nothing, or one, to their weights")
    return _native_or(_types(op, chip))


def _reduce_norm(op: ReduceNormOp, chip: Chip) -> Verdict:
    if op.world > 1 or op.scatter:
        return Verdict.composite("the sum over ranks is the communicator's, the norm that follows a call of its own")
    if op.out_formats not in ((), ("int8_row",)):
        return Verdict.composite(f"no norm call writes {', '.join(op.out_formats)}")
    if op.out_formats and op.dtype not in chip.halves:
        return Verdict.composite("rows are quantized from 16-bit types")
    if op.weight_offset not in (0.0, 1.0):
        return Verdict.composite("the norm calls add nothing, or one, to their weights")
    return _native_or(_types(op, chip))


def _act_mul(op: ActMulOp, chip: Chip) -> Verdict:
    return _native_or(_types(op, chip))


def _rope(op: RopeOp, chip: Chip) -> Verdict:
    if op.rotary_dim > MAX_ROTARY_DIM or max(op.num_heads, op.num_kv_heads) > MAX_ROTARY_HEADS:
        return Verdict.composite(f"the rotation call takes {MAX_ROTARY_HEADS} heads of {MAX_ROTARY_DIM} at most")
    return _native_or(_types(op, chip))


def _mla(op: MlaOp, chip: Chip) -> Verdict:
    reason = _types(op, chip, wide=False)
    if not latent_cache(chip, op.latent_dim + op.rope_dim, op.kv_dtype):
        if not chip.fused_latent:
            return Verdict.composite(f"{chip.family} has no latent attention call")
        return Verdict.composite("the latent attention call takes a latent of 512 beside 64, in 16 bits")
    if not reason and op.kv_dtype is not op.dtype:
        reason = f"the cache is {op.kv_dtype.value} and queries are {op.dtype.value}; the call takes one type"
    if not reason and op.num_heads > MAX_LATENT_HEADS:
        reason = f"at most {MAX_LATENT_HEADS} heads"
    if not reason and op.has("sparse") and op.has("lse"):
        reason = "the sparse call returns no log-sum-exp in the contract's form"
    if reason:
        return Verdict.no(reason)
    if op.has("sparse"):
        return Verdict.native()
    return Verdict.native(lens=Lens.HOST_EXACT, max_decode_q=MAX_PIECE, capture=Capture.UNIFORM)


def _mla_prolog(op: MlaPrologOp, chip: Chip) -> Verdict:
    if not latent_cache(chip, op.latent_dim + op.rope_dim, op.kv_dtype) or op.kv_dtype is not op.dtype:
        return Verdict.composite("a sum of its parts where the cache is not in two planes")
    return _native_or(_types(op, chip, wide=False))


def _index_topk(op: IndexTopkOp, chip: Chip) -> Verdict:
    reason = _types(op, chip, wide=False)
    if not chip.fused_latent:
        reason = f"{chip.family} has no index call"
    elif op.head_dim != INDEX_DIM or op.num_heads > MAX_INDEX_HEADS:
        reason = reason or f"the index call takes at most {MAX_INDEX_HEADS} heads of {INDEX_DIM}"
    elif op.top_k > 2048 and op.top_k not in INDEX_COUNTS:
        reason = reason or f"the index call does not choose {op.top_k} positions"
    elif op.kv_dtype is not op.dtype:
        reason = reason or "the index call takes one type"
    return _native_or(reason)


def _route(op: RouteOp, chip: Chip) -> Verdict:
    if not chip.grouped_rows:
        return Verdict.composite(f"{chip.family} has no routing call")
    if op.num_experts > MAX_EXPERTS:
        return Verdict.composite(f"the routing call takes at most {MAX_EXPERTS} experts")
    per_group = op.num_experts // max(op.num_groups, 1)
    if op.num_groups > 1 and (per_group <= 2 or -(-per_group // 32) * 32 * op.num_groups > MAX_EXPERTS):
        return Verdict.composite("the routing call takes groups of three experts and more, padded to 32 each")
    if op.dtype not in chip.float_types:
        return Verdict.composite(_types(op, chip))
    return Verdict.native()


def _experts(op: ExpertsOp, chip: Chip) -> Verdict:
    if not chip.grouped_rows:
        return Verdict.composite(f"{chip.family} has no call that sorts rows by expert")
    if op.scheme in ("fp8_channel", "fp8_tensor", "fp8_block"):
        return Verdict.composite(f"{chip.family} has no FP8 unit: such weights are made dense at load")
    if op.scheme not in ("none", "int8"):
        return Verdict.composite(f"torch_npu has no grouped product with {op.scheme} weights")
    if op.num_experts < 2:
        return Verdict.composite("the grouped product takes two experts and more")
    if max(op.hidden_size, 2 * op.intermediate_size) > MAX_INNER:
        return Verdict.composite(f"the grouped product takes inner dims of at most {MAX_INNER}")
    return _native_or(_types(op, chip, wide=False), input_format="int8_row" if op.scheme == "int8" else None)


def _gated_delta(op: GatedDeltaOp, chip: Chip) -> Verdict:
    if not chip.fused_latent:
        return Verdict.composite(f"{chip.family} has no gated delta rule")
    if op.dtype is not DType.BFLOAT16:
        return Verdict.composite(f"the gated delta calls compute in bfloat16, not in {op.dtype.value}")
    if op.k_dim != DELTA_DIM or op.v_dim != DELTA_DIM:
        return Verdict.composite(f"the gated delta calls take heads of {DELTA_DIM}")
    if max(op.num_k_heads, op.num_v_heads) > MAX_DELTA_HEADS:
        return Verdict.composite(f"the gated delta calls take at most {MAX_DELTA_HEADS} heads")
    return Verdict.native(capture=Capture.NEVER)


def _blocks(op: ExportBlocksOp | ImportBlocksOp | MoveTokensOp, chip: Chip) -> Verdict:
    if op.layout.canonical:
        return Verdict.composite("the layout is the canonical one: nothing to convert")
    return Verdict(kind=Kind.NATIVE)


_ABSENT = {
    "qk_norm_rope_write": "a sum of its parts: torch_npu fuses them only over fractal caches",
    "sample": "torch_npu's sampling draws other random numbers than those that all backends share",
    "rejection_sample": "torch_npu's sampling draws other random numbers than those that all backends share",
    "apply_token_bitmask": "torch_npu has no call for it",
    "advance": "a handful of index operations: torch_npu's is for one cache group and one layout",
    "merge_lse": "npu_attention_update leaves open what a part without keys gives",
    "conv1d": "npu_fused_causal_conv1d is of another chip and of width 3 alone",
    "ssd": "torch_npu has no state-space call",
    "dispatch": "npu_moe_distribute_dispatch packs tokens in a layout that only its own combine reads",
    "combine": "npu_moe_distribute_combine reads what only its own dispatch packs",
    "lora_add_": "torch_npu has no call for it",
}
"""Operations without a kernel, and why."""

_RULES: dict[type[OpSpec], Callable[[Any, Chip], Verdict]] = {
    ActMulOp: _act_mul,
    AttentionOp: _attention,
    EmbedOp: _embed,
    ExpertsOp: _experts,
    ExportBlocksOp: _blocks,
    GatedDeltaOp: _gated_delta,
    ImportBlocksOp: _blocks,
    IndexTopkOp: _index_topk,
    KvWriteOp: _kv_write,
    LinearOp: _linear,
    MlaOp: _mla,
    MlaPrologOp: _mla_prolog,
    MoveTokensOp: _blocks,
    ReduceNormOp: _reduce_norm,
    RmsNormOp: _rms_norm,
    RopeOp: _rope,
    RouteOp: _route,
}

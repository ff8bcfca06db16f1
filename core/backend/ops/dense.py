"""Operations of a dense decoder outside the cache, and those that turn logits into tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from core.backend.ops.spec import Args, OpSpec, optional
from core.backend.weights import Packed, Quantized
from core.spec import DType

__all__ = [
    "Act",
    "ActMulArgs",
    "ActMulOp",
    "Activation",
    "AdvanceArgs",
    "AdvanceOp",
    "ApplyTokenBitmaskArgs",
    "ApplyTokenBitmaskOp",
    "EmbedArgs",
    "EmbedOp",
    "LinearArgs",
    "LinearOp",
    "RejectionSampleArgs",
    "RejectionSampleOp",
    "RmsNormArgs",
    "RmsNormOp",
    "RopeArgs",
    "RopeOp",
    "SampleArgs",
    "SampleOp",
]

Act = Tensor | Quantized
"""An activation: a plain tensor, or one that a norm quantized for its consumer (`Packed.input_format`)."""

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Function on the gate of `act_mul`; "gelu_tanh" is the tanh approximation."""


@dataclass(slots=True, kw_only=True)
class EmbedArgs(Args):
    """Run-time tensors of `embed`.

    Args:
        token_ids: [T], int32, device; each in [0, rows of weight).
        weight: Packed with role "embedding" (or "tied": shared with the head), logical shape [rows, dim].
    """

    token_ids: Tensor
    weight: Packed


@dataclass(frozen=True, kw_only=True)
class EmbedOp(OpSpec):
    """Gathers rows of the embedding and multiplies them by `multiplier` (rounded to dtype first).

    Returns:
        [T, dim], model dtype.
    """

    name: ClassVar[str] = "embed"
    args: ClassVar[type[Args]] = EmbedArgs
    dim: int
    scheme: str = "none"
    multiplier: float = 1.0


@dataclass(slots=True, kw_only=True)
class LinearArgs(Args):
    """Run-time tensors of `linear`.

    Args:
        x: [T, in_features], contiguous in the last dim, read-only.
        weight: Packed with logical shape [out_features, in_features].
        bias: [out_features], model dtype.
    """

    x: Act
    weight: Packed
    bias: Tensor | None = optional("bias")


@dataclass(frozen=True, kw_only=True)
class LinearOp(OpSpec):
    """x @ weight.T (+ bias), accumulated in float32 (int32 between integers).

    Args:
        scheme: How the weight is stored ("none" is dense in `weight_dtype`), a name of `core.backend.schemes`.
        weight_dtype: Type of a dense weight.
        out_dtype: Type of the result.
        quantize_activations: Whether a kernel for a quantized weight may round plain activations, to the format that
            its Verdict declares (`activation_format`).

    Returns:
        [T, out_features], out_dtype.
    """

    name: ClassVar[str] = "linear"
    args: ClassVar[type[Args]] = LinearArgs
    in_features: int
    out_features: int
    scheme: str = "none"
    weight_dtype: DType = DType.BFLOAT16
    out_dtype: DType = DType.BFLOAT16
    quantize_activations: bool = False


@dataclass(slots=True, kw_only=True)
class RmsNormArgs(Args):
    """Run-time tensors of `rms_norm`.

    Args:
        x: [..., dim], model dtype, any stride but contiguous in the last dim, read-only.
        weight: [dim], model dtype or float32.
        residual: [..., dim], model dtype; may be overwritten.
    """

    x: Tensor
    weight: Tensor
    residual: Tensor | None = optional("residual")


@dataclass(frozen=True, kw_only=True)
class RmsNormOp(OpSpec):
    """Root-mean-square norm (Zhang and Sennrich, 2019), in float32: x / sqrt(mean(x^2) + eps) * (offset + weight).

    Returns:
        [..., dim], model dtype; with feature "residual" a pair (norm of x + residual, x + residual).
    """

    name: ClassVar[str] = "rms_norm"
    args: ClassVar[type[Args]] = RmsNormArgs
    dim: int
    eps: float
    weight_offset: float = 0.0


@dataclass(slots=True, kw_only=True)
class ActMulArgs(Args):
    """Run-time tensors of `act_mul`.

    Args:
        x: [T, 2 * size], model dtype, gate in the first half, read-only.
    """

    x: Tensor


@dataclass(frozen=True, kw_only=True)
class ActMulOp(OpSpec):
    """activation(x[:, :size]) * x[:, size:], computed in float32.

    Returns:
        [T, size], model dtype.
    """

    name: ClassVar[str] = "act_mul"
    args: ClassVar[type[Args]] = ActMulArgs
    size: int
    activation: Activation = "silu"


@dataclass(slots=True, kw_only=True)
class RopeArgs(Args):
    """Run-time tensors of `rope`.

    Args:
        query: [T, num_heads, head_dim], model dtype, any stride in the first two dims; may be overwritten.
        key: [T, num_kv_heads, head_dim], as query.
        positions: [T], int32, device.
        cos_sin: [max_position, rotary_dim], float32: cosines in the first half of a row, sines in the second.
    """

    query: Tensor
    key: Tensor
    positions: Tensor
    cos_sin: Tensor


@dataclass(frozen=True, kw_only=True)
class RopeOp(OpSpec):
    """Rotary position embedding (Su et al., 2021) of the first `rotary_dim` elements of each head, in float32.

    Args:
        interleaved: Pairs are (2i, 2i + 1) where true, (i, i + rotary_dim / 2) otherwise.

    Returns:
        (query, key), model dtype. They may be the inputs, overwritten; a caller uses only what is returned.
    """

    name: ClassVar[str] = "rope"
    args: ClassVar[type[Args]] = RopeArgs
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False


@dataclass(slots=True, kw_only=True)
class SampleArgs(Args):
    """Run-time tensors of `sample`; rows are sampled independently.

    Args:
        logits: [R, vocab_size], float32, contiguous in the last dim; may be overwritten.
        temperature: [R], float32; 0 takes the most likely token (lowest id among equals).
        seeds: [R], int64: key of the row's random numbers.
        positions: [R], int32: position in the sequence of the token to be drawn.
        top_k: [R], int32; 0 keeps all.
        top_p: [R], float32; 1 keeps all.
        min_p: [R], float32; 0 keeps all.
    """

    logits: Tensor
    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    top_k: Tensor | None = optional("top_k")
    top_p: Tensor | None = optional("top_p")
    min_p: Tensor | None = optional("min_p")


@dataclass(frozen=True, kw_only=True)
class SampleOp(OpSpec):
    """Draws one token a row with the random numbers that every backend shares.

    z = logits / max(temperature, 1e-5) in float32. Kept are the `top_k` largest z (ties: lower ids first); of these, in
    falling order of probability softmax(z over the kept), the shortest head whose sum reaches `top_p` (at least one);
    of these, those with probability at least min_p times the largest. The token is the argmax over the kept of
    z - log(-log(u)), u from `core.backend.philox` with (seed, position, token id, stream 0).

    Returns:
        [R], int32, device.
    """

    name: ClassVar[str] = "sample"
    args: ClassVar[type[Args]] = SampleArgs
    vocab_size: int


@dataclass(slots=True, kw_only=True)
class ApplyTokenBitmaskArgs(Args):
    """Run-time tensors of `apply_token_bitmask`.

    Args:
        logits: [R, vocab_size], float32; overwritten.
        bitmask: [R, ceil(vocab_size / 32)], int32, device: bit v % 32 of word v // 32 allows token v.
    """

    logits: Tensor
    bitmask: Tensor


@dataclass(frozen=True, kw_only=True)
class ApplyTokenBitmaskOp(OpSpec):
    """Sets the logits of tokens that are not allowed to -inf, in place. Returns None."""

    name: ClassVar[str] = "apply_token_bitmask"
    args: ClassVar[type[Args]] = ApplyTokenBitmaskArgs
    vocab_size: int


@dataclass(slots=True, kw_only=True)
class RejectionSampleArgs(Args):
    """Run-time tensors of `rejection_sample`. K is `num_spec_tokens`.

    Args:
        logits: [R, K + 1, vocab_size], float32: target logits after each draft token; rows past a request's drafts
            are ignored.
        draft_token_ids: [R, K], int32.
        num_draft_tokens: [R], int32, each in [0, K].
        temperature: [R], float32; 0 accepts a draft only where it is the most likely token.
        seeds: [R], int64.
        positions: [R], int32: position of the first token to be drawn.
        draft_probs: [R, K, vocab_size], float32: what the drafter drew from; None means that it was certain.
    """

    logits: Tensor
    draft_token_ids: Tensor
    num_draft_tokens: Tensor
    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    draft_probs: Tensor | None = optional("draft_probs")


@dataclass(frozen=True, kw_only=True)
class RejectionSampleOp(OpSpec):
    """Accepts a prefix of each request's draft and draws one more token (Leviathan et al., 2023).

    Draft token t is accepted with probability min(1, p(t) / q(t)), decided by u of (seed, position, t, stream 1). At
    the first rejection a token is drawn from max(p - q, 0) as `sample` draws (stream 2), else from p (stream 0).

    Returns:
        (token ids [R, K + 1], int32, -1 past the end; number of valid ones [R], int32, at least 1).
    """

    name: ClassVar[str] = "rejection_sample"
    args: ClassVar[type[Args]] = RejectionSampleArgs
    vocab_size: int
    num_spec_tokens: int


@dataclass(slots=True, kw_only=True)
class AdvanceArgs(Args):
    """Run-time tensors of `advance`: the decode state of R requests, all overwritten except `block_tables`.

    Args:
        token_ids: [R], int32: next input token.
        positions: [R], int32: its position.
        seq_lens: [R], int32: keys after it was written.
        block_tables: One [R, max_blocks] int32 tensor a cache group, read-only.
        slots: One [R] int32 tensor a cache group.
        sampled: [R, 1 + K], int32, read-only.
        num_accepted: [R], int32, read-only: valid entries of `sampled`; 0 leaves a row as it is.
    """

    token_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    sampled: Tensor
    num_accepted: Tensor


@dataclass(frozen=True, kw_only=True)
class AdvanceOp(OpSpec):
    """Moves the decode state on by what was sampled, on the device: next ids, positions, lengths and slots.

    token_ids[r] = sampled[r, n - 1]; positions and seq_lens grow by n; slots follow from block table and position.
    Returns None.
    """

    name: ClassVar[str] = "advance"
    args: ClassVar[type[Args]] = AdvanceArgs
    block_sizes: tuple[int, ...]
    num_spec_tokens: int = 0

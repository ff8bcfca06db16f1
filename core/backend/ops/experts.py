"""Mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from core.backend.comm import Communicator
from core.backend.ops.dense import Act, Activation
from core.backend.ops.spec import Args, OpSpec, optional
from core.backend.weights import Packed

__all__ = [
    "CombineArgs",
    "CombineOp",
    "DispatchArgs",
    "DispatchOp",
    "ExpertsArgs",
    "ExpertsOp",
    "RouteArgs",
    "RouteOp",
]


@dataclass(slots=True, kw_only=True)
class RouteArgs(Args):
    """Run-time tensors of `route`.

    Args:
        router_logits: [T, num_experts], float32, read-only.
        bias: [num_experts], float32: joins the scores for choosing, not for weighing.
    """

    router_logits: Tensor
    bias: Tensor | None = optional("bias")


@dataclass(frozen=True, kw_only=True)
class RouteOp(OpSpec):
    """Chooses `top_k` experts for each token.

    Scores are softmax or sigmoid of the logits. With groups, the `top_k_groups` best of `num_groups` equal groups stay
    (a group counts the sum of its two best biased scores with a bias, its best score without), then the best experts
    of those. Weights are the unbiased scores, divided by their sum where `renormalize`, times `scaling`.

    Returns:
        (weights [T, top_k], float32; expert ids [T, top_k], int32), in falling order of choice score (ties, of groups
        too: lower id first).
    """

    name: ClassVar[str] = "route"
    args: ClassVar[type[Args]] = RouteArgs
    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_k_groups: int = 1
    scaling: float = 1.0


@dataclass(slots=True, kw_only=True)
class ExpertsArgs(Args):
    """Run-time tensors of `experts`.

    Args:
        x: [T, hidden_size], read-only.
        gate_up: Packed, role "experts", logical shape [num_experts, 2 * intermediate_size, hidden_size], gate first.
        down: Packed, role "experts", logical shape [num_experts, hidden_size, intermediate_size].
        weights: [T, top_k], float32.
        expert_ids: [T, top_k], int32; ids outside [first_expert, first_expert + num_experts) are another rank's.
    """

    x: Act
    gate_up: Packed
    down: Packed
    weights: Tensor
    expert_ids: Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertsOp(OpSpec):
    """Sum over each token's experts of weight * down(act_mul(gate_up(x))); experts of other ranks count as zero.

    Returns:
        [T, hidden_size], model dtype.
    """

    name: ClassVar[str] = "experts"
    args: ClassVar[type[Args]] = ExpertsArgs
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    first_expert: int = 0
    activation: Activation = "silu"
    scheme: str = "none"


@dataclass(slots=True, kw_only=True)
class DispatchArgs(Args):
    """Run-time tensors of `dispatch`.

    Args:
        x: [T, hidden_size], model dtype.
        weights: [T, top_k], float32.
        expert_ids: [T, top_k], int32.
        comm: The expert-parallel ranks.
    """

    x: Tensor
    weights: Tensor
    expert_ids: Tensor
    comm: Communicator


@dataclass(frozen=True, kw_only=True)
class DispatchOp(OpSpec):
    """Brings tokens to the ranks of their experts, with a static capacity and no host synchronisation.

    Args:
        capacity: Most tokens that a rank contributes (equal on all ranks); shorter inputs are padded.

    Returns:
        (x [world * capacity, hidden_size], weights, expert_ids): padding rows have expert id -1.
    """

    name: ClassVar[str] = "dispatch"
    args: ClassVar[type[Args]] = DispatchArgs
    hidden_size: int
    top_k: int
    capacity: int
    world: int = 1


@dataclass(slots=True, kw_only=True)
class CombineArgs(Args):
    """Run-time tensors of `combine`.

    Args:
        x: [world * capacity, hidden_size], model dtype: this rank's experts' results for every row of `dispatch`.
        num_tokens: T of the rank's own tokens, on the host.
        comm: The expert-parallel ranks.
    """

    x: Tensor
    num_tokens: int
    comm: Communicator


@dataclass(frozen=True, kw_only=True)
class CombineOp(OpSpec):
    """Sums the ranks' results and brings each rank its own tokens back.

    Returns:
        [num_tokens, hidden_size], model dtype.
    """

    name: ClassVar[str] = "combine"
    args: ClassVar[type[Args]] = CombineArgs
    hidden_size: int
    capacity: int
    world: int = 1

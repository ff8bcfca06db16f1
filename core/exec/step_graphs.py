"""Recorded steps: the forward of a decode step is captured once for each size and replayed on refreshed inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from core.backend import Backend, Batch, Capture, Graph, GroupSpec, Kind, Plan
from core.backend.negotiate import OpTable
from core.backend.ops import LayerCache
from core.backend.reference import HOST_READERS
from core.exec.step_arrays import StepArrays, StepBuffers
from core.kv.groups import KVCacheGroups
from core.models.base import CausalLM
from core.sched.output import ScheduledRequest
from core.sched.step_sizes import paid_size

__all__ = ["GraphRule", "RecordedStep", "StepGraphs", "graph_rule", "padded_size"]

logger = logging.getLogger("core.exec")

MAX_GRAPH_REQS = 512
"""Requests of the largest recorded step: above it computing takes so long that the host keeps up."""
MAX_SPREAD_TOKENS = 48
"""Tokens of chunks that run as rows of a recorded step: with more of them a step's work hides its calls."""
MAX_SPREAD_PAIRS = 32 * 1024
"""Keys that those rows read in all: above it reading them once for the whole chunk is faster."""
_ORDER = (Capture.ANY, Capture.UNIFORM, Capture.SINGLE, Capture.NEVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRule:
    """Whether a model's steps may be recorded on a device.

    Args:
        capture: The widest class of steps that every operation allows.
        reason: What stands against it where that is NEVER, for people.
    """

    capture: Capture
    reason: str = ""

    def describe(self) -> str:
        """For the line that tells how a model was resolved."""
        return f"no graphs ({self.reason})" if self.capture is Capture.NEVER else "graphs of decode steps"


def graph_rule(backend: Backend, table: OpTable, *, enforce_eager: bool = False, observed: bool = False) -> GraphRule:
    """The rule for the operations of a model's forward.

    Args:
        table: What `forward` binds; the sampler stays outside of graphs.
        enforce_eager: The operator wants none.
        observed: Whether somebody watches each operation, of which a replay shows none.
    """
    if enforce_eager:
        return GraphRule(capture=Capture.NEVER, reason="--enforce-eager")
    if observed:
        return GraphRule(capture=Capture.NEVER, reason="each operation is observed")
    if type(backend).capture is Backend.capture:
        return GraphRule(capture=Capture.NEVER, reason="the backend records no steps")
    widest, reason = Capture.ANY, ""
    for row, _ in table.rows():
        for part in row.flat():
            reads_host = part.kind is Kind.COMPOSITE and not part.parts and part.op.name in HOST_READERS
            allowed = Capture.NEVER if reads_host else part.verdict.capture
            if _ORDER.index(allowed) > _ORDER.index(widest):
                widest = allowed
                how = "its composite reads lengths on the host" if reads_host else "the backend says NEVER"
                reason = f"{part.op.name}: {how}"
    return GraphRule(capture=widest, reason=reason if widest is Capture.NEVER else "")


def padded_size(num_reqs: int, most: int) -> int | None:
    """Requests of the recorded step that serves `num_reqs`: 1, 2, 4, 8, then multiples of 8; None above `most`."""
    return None if num_reqs > most else min(paid_size(num_reqs), most)


@dataclass(slots=True, kw_only=True)
class RecordedStep:
    """One size of step.

    Args:
        batch: Views of the storage that the graph reads.
        buffers: That storage.
        plans: One a cache group; None until the first step of this size.
        graph: The recording; None until then.
    """

    batch: Batch
    buffers: StepBuffers
    plans: list[Plan] | None = None
    graph: Graph | None = None

    def put(self, arrays: StepArrays) -> Batch:
        """Brings a step into the storage."""
        self.buffers.fill(arrays, self.batch)
        return self.batch


class StepGraphs:
    """The recorded steps of one model, made when a size is met for the first time.

    A failure to record is told once; from then on every step runs eagerly.

    Args:
        backend: Opened.
        model: Loaded; weights may be replaced in place later.
        groups: Which layer belongs to which cache group.
        group_specs: What the plan of each group must serve.
        caches: The planes of each layer.
        rule: Which steps may be recorded.
        buffers: Storage for the inputs, one for each number of tokens a request that may be recorded.
        max_num_reqs: Rows of that storage.
    """

    def __init__(
        self,
        backend: Backend,
        model: CausalLM,
        groups: KVCacheGroups,
        group_specs: Sequence[GroupSpec],
        caches: Sequence[LayerCache | None],
        *,
        rule: GraphRule,
        buffers: Sequence[StepBuffers],
        max_num_reqs: int,
    ) -> None:
        self._backend, self._model = backend, model
        self._groups, self._group_specs, self._caches = groups, tuple(group_specs), caches
        self._max_num_reqs = max_num_reqs
        self._buffers = {b.query_len: b for b in buffers if _fits(rule.capture, b.query_len)}
        self._steps: dict[tuple[int, int], RecordedStep] = {}
        self.num_replays = 0
        """Steps that were replayed, for tests and people."""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(tokens of a request, requests) of each recorded step."""
        return sorted(self._steps)

    def match(self, scheduled: Sequence[ScheduledRequest], width: int) -> RecordedStep | None:
        """The recorded step that serves these requests; None where they have to run eagerly.

        Args:
            width: Columns of the block table that they need.
        """
        query_len = scheduled[0].num_scheduled_tokens if scheduled else 0
        buffers = self._buffers.get(query_len)
        if buffers is None or width > buffers.table_width:
            return None
        num_rows = len(scheduled)
        if any(entry.num_scheduled_tokens != query_len for entry in scheduled):
            if query_len != 1 or not _may_spread(scheduled):
                return None
            num_rows = sum(entry.num_scheduled_tokens for entry in scheduled)
        size = padded_size(num_rows, self._max_num_reqs)
        if size is None:
            return None
        step = self._steps.get((query_len, size))
        if step is None:
            step = RecordedStep(batch=buffers.batch(size), buffers=buffers)
            self._steps[query_len, size] = step
        return step

    def forward(self, step: RecordedStep) -> Tensor:
        """Hidden states of the step whose arrays were put into `step`; valid until its next forward."""
        self._model.prepare(step.batch)
        if step.graph is None and not self._record(step):
            return self._eager(step)
        assert step.graph is not None and step.plans is not None
        for plan, spec in zip(step.plans, self._group_specs, strict=True):
            self._backend.plan(step.batch, spec, into=plan)
        self.num_replays += 1
        hidden: Tensor = step.graph.replay(step.plans)
        return hidden

    def layer_plans(self, plans: Sequence[Plan]) -> list[Plan | None]:
        """The plan of each layer's group; None for a layer without a cache."""
        return [None if place is None else plans[place[0]] for place in self._groups.layer_slabs]

    def _record(self, step: RecordedStep) -> bool:
        plans = [self._backend.plan(step.batch, spec) for spec in self._group_specs]
        layer_plans = self.layer_plans(plans)
        try:
            step.graph = self._backend.capture(
                lambda: self._model.forward(step.batch, layer_plans, self._caches), plans
            )
        except Exception as error:
            self._buffers, self._steps = {}, {}
            logger.warning(
                "a step of %d requests could not be recorded (%s: %s); all steps run eagerly, which is slower; "
                "--enforce-eager says so from the start",
                step.batch.num_reqs,
                type(error).__name__,
                error,
            )
            return False
        step.plans = plans
        return True

    def _eager(self, step: RecordedStep) -> Tensor:
        """The same padded step, run as it is."""
        plans = [self._backend.plan(step.batch, spec) for spec in self._group_specs]
        return self._model.forward(step.batch, self.layer_plans(plans), self._caches)


def _may_spread(scheduled: Sequence[ScheduledRequest]) -> bool:
    """Whether a step of single tokens and of small chunks may run with each token of a chunk as a row of its own.

    The token at position p attends to p + 1 keys, which is what a request of one token with as many keys does; all
    keys of a step are written before any is read. Each row reads its keys anew, so only few of them pay.
    """
    chunks = [entry for entry in scheduled if entry.num_scheduled_tokens > 1]
    if any(entry.draft_token_ids for entry in chunks):
        return False
    num_tokens = sum(entry.num_scheduled_tokens for entry in chunks)
    num_pairs = sum(e.num_scheduled_tokens * (e.num_computed_tokens + e.num_scheduled_tokens) for e in chunks)
    return num_tokens <= MAX_SPREAD_TOKENS and num_pairs <= MAX_SPREAD_PAIRS


def _fits(capture: Capture, query_len: int) -> bool:
    return capture in (Capture.ANY, Capture.UNIFORM) or (capture is Capture.SINGLE and query_len == 1)

"""Runs steps of one model on one device: prepare, forward, logits, sample. Never decides who runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.backend import Backend, Capture, KVSlab, Pending
from core.backend.negotiate import OpTable
from core.errors import EngineDeadError
from core.exec.decode_run import DecodeRun
from core.exec.device_copies import DeviceCopies
from core.exec.drafts import Proposer
from core.exec.input_batch import InputBatch, StepInputs
from core.exec.kv_memory import KVPool
from core.exec.request_state import RequestState
from core.exec.runner_step import RunnerStep
from core.exec.sampler import SampledRows, Sampler, SamplingRow, needs_known_tokens, position_logprobs, top_logprobs
from core.exec.step_arrays import StepBuffers
from core.exec.step_graphs import MAX_GRAPH_REQS, GraphRule, RecordedStep, StepGraphs
from core.exec.step_result import StepResult, collect
from core.exec.token_masks import TokenMasks
from core.kv.groups import KVCacheGroups
from core.models.base import CausalLM
from core.outputs import PositionLogprobs
from core.sched.output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from core.spec import KVCacheSpec, ModelSpec

__all__ = ["ModelRunner"]

_LOGPROB_ROWS = 64
"""Rows of prompt logits at a time: all rows of a long prompt times a large vocabulary would be gigabytes."""


_Prepared = tuple[StepInputs, RecordedStep | None, DecodeRun | None]
"""A step that can run: its inputs, the recorded step that they lie in, and the run that it belongs to."""


class ModelRunner:
    """Runs submitted steps in order on a thread of its own; the host prepares the next one meanwhile.

    Args:
        backend: Opened; closed with the runner.
        model: Loaded.
        sampler: Bound.
        pool: Memory of the KV cache.
        max_num_seqs: Most requests in a step.
        max_model_len: Longest sequence.
        rule: Which steps may be recorded.
        table: How operations were resolved.
        resolved: The same in one line, for people.
        proposer: Proposes draft tokens; None for none.
        token_masks: Constrains requests; the sampler must be made for masks.
    """

    def __init__(
        self,
        backend: Backend,
        model: CausalLM,
        sampler: Sampler,
        pool: KVPool,
        *,
        max_num_seqs: int,
        max_model_len: int,
        rule: GraphRule,
        table: OpTable,
        resolved: str,
        proposer: Proposer | None = None,
        token_masks: TokenMasks | None = None,
    ) -> None:
        self._backend = backend
        self._model = model
        self._vocab_size = model.spec.vocab_size
        self._sampler = sampler
        self._proposer = proposer
        self._token_masks = token_masks
        self._pool = pool
        self._caches = pool.layer_caches()
        copies = DeviceCopies(backend)
        self._inputs = InputBatch(max_num_seqs, pool.groups.groups, self.block_size, copies)
        rows, width = min(max_num_seqs, MAX_GRAPH_REQS), -(-max_model_len // self.block_size)
        storage = (
            []
            if rule.capture is Capture.NEVER
            else [StepBuffers(copies, rows, 1, table_width=width, num_groups=len(pool.group_specs))]
        )
        self.graphs = StepGraphs(
            backend,
            model,
            pool.groups,
            pool.group_specs,
            self._caches,
            rule=rule,
            buffers=storage,
            max_num_reqs=rows,
        )
        self._lock = threading.Lock()
        """Guards the request mirror: the runner thread reads it, whoever takes a result appends to it."""
        self._unfinished: StepResult | None = None
        self._run: DecodeRun | None = None
        """The run that the last step belongs to; None where the next step has to be prepared from the start."""
        self._queue: queue.SimpleQueue[RunnerStep | None] = queue.SimpleQueue()
        self._closed = False
        self.table = table
        self.resolved = resolved
        self._thread = threading.Thread(target=self._serve, name="model-runner", daemon=True)
        self._thread.start()

    @property
    def model_spec(self) -> ModelSpec:
        """Shape of the model."""
        return self._model.spec

    @property
    def num_blocks(self) -> int:
        """Blocks of the device pool, the null block included."""
        return self._pool.slabs[0].num_blocks

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host pool for swapping; 0 without one."""
        return self._pool.host_slabs[0].num_blocks if self._pool.host_slabs else 0

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._pool.slabs[0].layout.block_size

    @property
    def cache_groups(self) -> KVCacheGroups:
        """Cache groups of the model."""
        return self._pool.groups

    @property
    def groups(self) -> tuple[KVCacheSpec, ...]:
        """One spec for each cache group."""
        return tuple(group.spec for group in self._pool.groups.groups)

    def submit(self, output: SchedulerOutput) -> RunnerStep:
        """Queues a step and returns at once.

        Raises:
            EngineDeadError: the runner was closed.
        """
        if self._closed:
            raise EngineDeadError("the model runner is closed; start a new engine")
        step = RunnerStep(output, self._execute, self.finalize)
        self._queue.put(step)
        return step

    def close(self) -> None:
        """Ends the thread after the step that it is at, and closes the device. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._backend.close()

    def finalize(self, step: StepResult) -> ModelRunnerOutput:
        """Waits for a step's tensors and writes its tokens down in the mirror; a second call gives the same output."""
        if not step.pending.done():
            with torch.inference_mode():  # which the tensors come from
                step.pending.wait()
        with self._lock:
            if step.output is None:
                step.output = self._collect(step)
            return step.output

    # -- the runner's thread -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _serve(self) -> None:
        while (step := self._queue.get()) is not None:
            step.run()
            del step  # the queue may stay empty for long

    def _execute(self, output: SchedulerOutput) -> StepResult:
        with self._lock:
            # Before anything that may raise: a request whose step failed must not stay here for ever.
            for request_id in output.dropped_request_ids:
                self._inputs.drop(request_id)
        self._swap(output)
        if not output.scheduled:
            return StepResult(step_id=output.step_id)
        run, self._run = self._run, None  # a step that raises ends it
        inputs, recorded, run = self._go_on(output, run) or self._prepare(output)
        self._unfinished = step = self._forward(output.step_id, inputs, recorded)
        self._run = run
        return step

    def _go_on(self, output: SchedulerOutput, run: DecodeRun | None) -> _Prepared | None:
        with self._lock:
            return None if run is None or not run.advance(output) else (run.inputs, run.recorded, run)

    def _prepare(self, output: SchedulerOutput) -> _Prepared:
        """From the start: in the storage of the recorded step that serves the requests, where one does."""
        self._await_known_tokens(output.scheduled)
        with self._lock:
            self._take_up(output)
            recorded = self._match(output.scheduled)
            put = None if recorded is None else recorded.put
            spread = recorded is not None and recorded.buffers.query_len == 1
            inputs = self._inputs.prepare(output.scheduled, put, spread=spread)
        if recorded is None or not DecodeRun.may_begin(output, recorded) or any(map(self._looks_back, inputs.states)):
            return inputs, recorded, None
        return inputs, recorded, DecodeRun(inputs, recorded, self._inputs)

    def _await_known_tokens(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Takes the previous step's tokens to the host where penalties, bad words or masks must see them."""
        step = self._unfinished
        if step is None or step.output is not None:
            return
        states = (self._inputs.get(entry.request_id) for entry in scheduled)
        if any(state is not None and self._looks_back(state) for state in states):
            self.finalize(step)

    def _looks_back(self, state: RequestState) -> bool:
        masks = self._token_masks
        return needs_known_tokens(state.params) or (masks is not None and masks.constrains(state.request_id))

    def _take_up(self, output: SchedulerOutput) -> None:
        for request in output.new_requests:
            self._inputs.add(request)
        for entry in output.scheduled:
            self._inputs.append_blocks(entry)

    def _swap(self, output: SchedulerOutput) -> None:
        if output.swap_out:
            self._copy_blocks(self._pool.slabs, self._pool.host_slabs, output.swap_out)
        if output.swap_in:
            self._copy_blocks(self._pool.host_slabs, self._pool.slabs, output.swap_in)

    def _copy_blocks(self, sources: list[KVSlab], targets: list[KVSlab], pairs: list[tuple[int, int]]) -> None:
        after = self._backend.fence()
        copies = [
            self._backend.copy_blocks(source, target, pairs, after)
            for source, target in zip(sources, targets, strict=True)
        ]
        for copy in copies:
            copy.wait()

    def _match(self, scheduled: Sequence[ScheduledRequest]) -> RecordedStep | None:
        longest = max([entry.num_computed_tokens + entry.num_scheduled_tokens for entry in scheduled], default=0)
        return self.graphs.match(scheduled, -(-longest // self.block_size))

    def _forward(self, step_id: int, inputs: StepInputs, recorded: RecordedStep | None) -> StepResult:
        hidden = self._run_model(inputs) if recorded is None else self.graphs.forward(recorded)
        rows, on_host, pending = None, None, Pending()
        if inputs.sample_indices:
            rows = self._sample(hidden, inputs)
            if rows.on_host is None:
                on_host, pending = self._backend.to_host(rows.token_ids)
        return StepResult(
            step_id=step_id,
            states=inputs.sampling,
            draft_token_ids=inputs.draft_token_ids,
            rows=rows,
            token_ids=on_host,
            pending=pending,
            prompt_logprobs=self._prompt_logprobs(hidden, inputs),
        )

    def _run_model(self, inputs: StepInputs) -> Tensor:
        """The step as it is, without a recording."""
        plans = self.graphs.layer_plans([self._backend.plan(inputs.batch, spec) for spec in self._pool.group_specs])
        return self._model.forward(inputs.batch, plans, self._caches)

    def _sample(self, hidden: Tensor, inputs: StepInputs) -> SampledRows:
        # Every token's row, or some of them.
        wanted = hidden if len(inputs.mirror_rows) == inputs.batch.num_tokens else hidden[inputs.logits_rows]
        logits = self._logits(wanted)
        if not inputs.sampling_rows:
            places = zip(inputs.sample_indices, inputs.sample_positions, strict=True)
            inputs.sampling_rows = [self._sampling_row(inputs.states[index], position) for index, position in places]
        sampled = self._sampler.sample(logits, inputs.sampling_rows, inputs.positions)
        # Of a request with drafts any row's token may stay here: it runs again when the host knows which counts.
        self._inputs.keep_sampled(inputs.mirror_rows, sampled)
        return sampled

    def _sampling_row(self, state: RequestState, position: int) -> SamplingRow:
        row = SamplingRow(state=state, position=position)
        if needs_known_tokens(state.params):
            row.token_ids = self._inputs.tokens_before(state, position).copy()
        if self._token_masks is not None and self._token_masks.constrains(state.request_id):
            output = self._inputs.tokens_before(state, position)[state.num_prompt_tokens :]
            row.bitmask = self._token_masks.allowed(state.request_id, output)
        return row

    def _logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size], float32: padding rows of the head are cut off."""
        logits = self._model.logits(hidden)
        return logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size]

    def _prompt_logprobs(self, hidden: Tensor, inputs: StepInputs) -> dict[str, tuple[int, list[PositionLogprobs]]]:
        if not any(state.params.prompt_logprobs is not None for state in inputs.states):
            return {}
        found, stop = {}, 0
        for state, entry in zip(inputs.states, inputs.scheduled, strict=True):
            start, stop = stop, stop + entry.num_scheduled_tokens
            count = state.params.prompt_logprobs
            if count is None:
                continue
            first = entry.num_computed_tokens + 1
            end = min(entry.num_computed_tokens + entry.num_scheduled_tokens + 1, state.num_prompt_tokens)
            if first < end:
                rows = hidden[start : start + end - first]
                tokens = self._inputs.tokens(state)[first:end]
                found[state.request_id] = (first, self._score(rows, tokens.astype(np.int64), count))
        return found

    def _score(self, hidden: Tensor, tokens: npt.NDArray[np.int64], count: int) -> list[PositionLogprobs]:
        scores: list[PositionLogprobs] = []
        for start in range(0, len(tokens), _LOGPROB_ROWS):
            part = slice(start, start + _LOGPROB_ROWS)
            logprobs = torch.log_softmax(self._logits(hidden[part]), dim=-1)
            actual = torch.from_numpy(tokens[part]).to(logprobs.device)
            parts = top_logprobs(logprobs, actual, min(count, logprobs.shape[1]))
            scores += position_logprobs(parts, [count] * len(actual))
        return scores

    def _collect(self, step: StepResult) -> ModelRunnerOutput:
        output = collect(step)
        for state in step.states:
            token_ids = output.sampled_token_ids.get(state.request_id)
            if token_ids is not None:
                self._inputs.append_tokens(state, token_ids)
                if self._proposer is not None and self._inputs.get(state.request_id) is state:
                    drafts = self._proposer.propose(state.request_id, self._inputs.tokens(state))
                    output.draft_token_ids[state.request_id] = drafts
        return output

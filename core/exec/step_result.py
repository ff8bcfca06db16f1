"""A step whose tensors may still be on their way to the host, and what it says of each request once they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from core.backend import Pending
from core.exec.drafts import count_accepted
from core.exec.request_state import RequestState
from core.exec.sampler import SampledRows, position_logprobs
from core.outputs import PositionLogprobs
from core.sched.output import ModelRunnerOutput

__all__ = ["StepResult", "collect"]


@dataclass(slots=True, kw_only=True)
class StepResult:
    """A step that was started.

    Args:
        states: Requests that sample.
        draft_token_ids: Drafts of each of them; a request has one row, and one more for each draft.
        rows: What the sampler gave for the rows of all of them; None where nobody samples.
        token_ids: The same token ids on the host, once `pending` is done; None where `rows` has them.
        prompt_logprobs: As in `ModelRunnerOutput`.
        output: What `collect` made of it.
    """

    step_id: int
    states: list[RequestState] = field(default_factory=list)
    draft_token_ids: list[Sequence[int]] = field(default_factory=list)
    rows: SampledRows | None = None
    token_ids: Tensor | None = None
    pending: Pending = field(default_factory=Pending)
    prompt_logprobs: dict[str, tuple[int, list[PositionLogprobs]]] = field(default_factory=dict)
    output: ModelRunnerOutput | None = None


def collect(step: StepResult) -> ModelRunnerOutput:
    """The tokens that each request gained: drafts up to the first wrong one, and the token drawn behind them."""
    output = ModelRunnerOutput(step_id=step.step_id, prompt_logprobs=step.prompt_logprobs)
    if step.rows is None:
        return output
    token_ids, failed, start = step.rows.on_host, step.rows.failed, 0
    if token_ids is None:
        assert step.token_ids is not None, "sampled tokens go to the host"
        token_ids = step.token_ids.tolist()
    logprobs = _row_logprobs(step, step.rows)
    if not failed and not logprobs and len(token_ids) == len(step.states):  # nobody has drafts
        output.sampled_token_ids = {s.request_id: [token] for s, token in zip(step.states, token_ids, strict=True)}
        return output
    for state, drafts in zip(step.states, step.draft_token_ids, strict=True):
        end = start + 1 + count_accepted(drafts, token_ids[start:])
        if failed:
            end = next((row for row in range(start, end) if row in failed), end)
        if end == start:
            output.errors[state.request_id] = failed[start]
        else:
            output.sampled_token_ids[state.request_id] = token_ids[start:end]
            if state.params.logprobs is not None:
                output.logprobs[state.request_id] = [logprobs[row] for row in range(start, end)]
        start += 1 + len(drafts)
    return output


def _row_logprobs(step: StepResult, rows: SampledRows) -> dict[int, PositionLogprobs]:
    """Entries of the rows that asked for them."""
    if rows.logprobs is None:
        return {}
    pairs = zip(step.states, step.draft_token_ids, strict=True)
    states = [state for state, drafts in pairs for _ in range(1 + len(drafts))]
    counts = [states[row].params.logprobs or 0 for row in rows.logprob_rows]
    return dict(zip(rows.logprob_rows, position_logprobs(rows.logprobs, counts), strict=True))

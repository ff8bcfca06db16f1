"""From logits to tokens: masks, penalties and biases on the device, the draw by the backend's `sample` operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.backend.negotiate import Binder
from core.backend.ops import ApplyTokenBitmaskArgs, ApplyTokenBitmaskOp, Determinism, SampleArgs, SampleOp
from core.exec.request_state import RequestState
from core.exec.token_masks import mask_words
from core.outputs import PositionLogprobs
from core.sampling_params import SamplingParams
from core.spec import DType

__all__ = [
    "SampledRows",
    "Sampler",
    "SamplingRow",
    "needs_known_tokens",
    "position_logprobs",
    "sample_ops",
    "top_logprobs",
]

_NO_CANDIDATE = "every token is masked (allowed_token_ids, bad_words, logit_bias, min_tokens or a grammar); relax them"


def needs_known_tokens(params: SamplingParams) -> bool:
    """Whether sampling looks at the tokens so far, so that the newest one must be known to the host."""
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words_token_ids
    )


def sample_ops(vocab_size: int, determinism: Determinism) -> tuple[SampleOp, SampleOp]:
    """The operations of a Sampler: one for rows that keep all candidates, one for rows that filter them."""
    plain = SampleOp(dtype=DType.FLOAT32, vocab_size=vocab_size, determinism=determinism)
    return plain, replace(plain, features=frozenset({"top_k", "top_p", "min_p"}))


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """One row of logits to sample from.

    Args:
        state: Whose row it is.
        position: Position in the sequence of the token to be drawn.
        token_ids: The request's tokens before it, on the host; only where `needs_known_tokens`.
        bitmask: Bits of the tokens that may be drawn, as `TokenMasks.allowed` gives them; None allows all.
    """

    state: RequestState
    position: int
    token_ids: npt.NDArray[np.int32] | None = None
    bitmask: npt.NDArray[np.int32] | None = None


@dataclass(slots=True, kw_only=True)
class SampledRows:
    """What the sampler gave; tensors are on the device and may still be computed.

    Args:
        token_ids: [S], int32.
        on_host: The same, where the host knows them already.
        failed: Rows without a candidate, with the reason; their token id means nothing.
        logprobs: (values [L, k + 1], ids [L, k + 1], ranks [L]) of the rows in `logprob_rows`, actual token first.
        logprob_rows: Rows that asked for logprobs.
    """

    token_ids: Tensor
    on_host: list[int] | None = None
    failed: dict[int, str] = field(default_factory=dict)
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None
    logprob_rows: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Parameters:
    """What the requests of a step ask for, as the device takes it; the same for every step of the same requests.

    Args:
        states: The requests, in the order of the rows.
        constrained_rows: Rows whose logits are changed before the draw.
        logprob_rows: Rows that asked for logprobs.
        top_k: None, as `top_p` and `min_p`, where no row filters its candidates.
    """

    states: list[RequestState]
    constrained_rows: list[int]
    logprob_rows: list[int]
    temperature: Tensor
    seeds: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


class Sampler:
    """Samples rows independently of each other: a row's token depends on its own logits, parameters and seed alone.

    Args:
        binder: Binds the `sample` operation in the variants that are needed.
        vocab_size: Ids that may be drawn.
        device: Where logits live.
        masks: Whether rows may come with a bitmask.
    """

    def __init__(
        self,
        binder: Binder,
        vocab_size: int,
        device: torch.device,
        determinism: Determinism,
        *,
        masks: bool = False,
    ) -> None:
        self._plain, self._filtered = map(binder.bind, sample_ops(vocab_size, determinism))
        bitmask = ApplyTokenBitmaskOp(dtype=DType.FLOAT32, vocab_size=vocab_size, determinism=determinism)
        self._apply_bitmask = binder.bind(bitmask) if masks else None
        self._vocab_size = vocab_size
        self._device = device
        self._last: _Parameters | None = None

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow], positions: Tensor | None = None) -> SampledRows:
        """Draws one token a row.

        Args:
            logits: [S, vocab_size], float32; overwritten.
            positions: [S], int32, device: those of the rows, where they lie there already; read before it returns.
        """
        params = self._parameters(rows)
        wanted = params.logprob_rows
        # Log-probabilities are the model's own: taken before masks, penalties and temperature.
        raw = torch.log_softmax(logits[wanted], dim=-1) if wanted else None
        constrained = params.constrained_rows
        if self._apply_bitmask is not None:
            constrained = sorted({*constrained, *(i for i, row in enumerate(rows) if row.bitmask is not None)})
        failed = self._constrain(logits, rows, constrained) if constrained else {}
        if positions is None:
            positions = self._ints([row.position for row in rows])
        token_ids = self._draw(logits, positions, params)
        out = SampledRows(token_ids=token_ids, failed=failed, logprob_rows=wanted)
        if raw is not None:
            most = max(rows[i].state.params.logprobs or 0 for i in wanted)
            out.logprobs = top_logprobs(raw, token_ids[wanted].long(), most)
        return out

    def _parameters(self, rows: Sequence[SamplingRow]) -> _Parameters:
        """Those of the step before where it had the same requests: most steps of a stream have."""
        states = [row.state for row in rows]
        if self._last is None or self._last.states != states:
            self._last = self._gather(states)
        return self._last

    def _gather(self, states: list[RequestState]) -> _Parameters:
        params = [state.params for state in states]
        found = _Parameters(
            states=states,
            constrained_rows=[index for index, p in enumerate(params) if _constrains(p)],
            logprob_rows=[index for index, p in enumerate(params) if p.logprobs is not None],
            temperature=self._floats([p.temperature for p in params]),
            seeds=torch.tensor([state.seed for state in states], dtype=torch.int64, device=self._device),
        )
        if any(_filters(p) for p in params):
            found.top_k = self._ints([0 if p.top_k < 0 else min(p.top_k, self._vocab_size) for p in params])
            found.top_p = self._floats([p.top_p for p in params])
            found.min_p = self._floats([p.min_p for p in params])
        return found

    def _draw(self, logits: Tensor, positions: Tensor, params: _Parameters) -> Tensor:
        args = SampleArgs(
            logits=logits,
            temperature=params.temperature,
            seeds=params.seeds,
            positions=positions,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        sample = self._plain if params.top_k is None else self._filtered
        return sample(args)  # type: ignore[no-any-return]

    def _constrain(self, logits: Tensor, rows: Sequence[SamplingRow], indices: Sequence[int]) -> dict[int, str]:
        masked = []
        for index in indices:
            row = rows[index]
            params = row.state.params
            _penalize(logits[index], row)
            if params.logit_bias:
                ids = list(params.logit_bias)
                logits[index, ids] += self._floats(list(params.logit_bias.values()))
            if self._mask(logits[index], row) or row.bitmask is not None:
                masked.append(index)
        self._apply_bitmasks(logits, rows)
        if not masked:
            return {}
        dead = (logits[masked].amax(dim=-1) == float("-inf")).tolist()
        return {index: _NO_CANDIDATE for index, is_dead in zip(masked, dead, strict=True) if is_dead}

    def _mask(self, logits: Tensor, row: SamplingRow) -> bool:
        params, masked = row.state.params, False
        if params.allowed_token_ids is not None:
            kept = list(params.allowed_token_ids)
            values = logits[kept]
            logits.fill_(float("-inf"))
            logits[kept] = values
            masked = True
        forbidden = _forbidden_ids(row)
        if forbidden:
            logits[forbidden] = float("-inf")
            masked = True
        return masked

    def _apply_bitmasks(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        if all(row.bitmask is None for row in rows):
            return
        assert self._apply_bitmask is not None, "the sampler was made without masks"
        words = np.full((len(rows), mask_words(self._vocab_size)), -1, dtype=np.int32)
        for index, row in enumerate(rows):
            if row.bitmask is not None:
                words[index] = row.bitmask
        bitmask = torch.from_numpy(words).to(self._device)
        self._apply_bitmask(ApplyTokenBitmaskArgs(logits=logits, bitmask=bitmask))

    def _floats(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def _filters(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def _constrains(params: SamplingParams) -> bool:
    return bool(
        needs_known_tokens(params) or params.logit_bias or params.min_tokens > 0 or params.allowed_token_ids is not None
    )


def _forbidden_ids(row: SamplingRow) -> list[int]:
    params = row.state.params
    ids: list[int] = []
    # The token to be drawn is output number position - prompt + 1; below min_tokens nothing may end the request.
    if row.position - row.state.num_prompt_tokens < params.min_tokens:
        ids += [*params.eos_token_ids, *params.stop_token_ids]
    if params.bad_words_token_ids:
        assert row.token_ids is not None
        output = row.token_ids[row.state.num_prompt_tokens :].tolist()
        for word in params.bad_words_token_ids:
            head = list(word[:-1])
            if not head or output[-len(head) :] == head:
                ids.append(word[-1])
    return ids


def _penalize(logits: Tensor, row: SamplingRow) -> None:
    """Repetition (prompt and output), frequency and presence (output only) penalties, in place, in that order."""
    params = row.state.params
    if params.repetition_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty:
        return
    assert row.token_ids is not None
    tokens = torch.from_numpy(row.token_ids.astype(np.int64)).to(logits.device)
    if params.repetition_penalty != 1.0:
        seen = torch.unique(tokens)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    ids, counts = torch.unique(tokens[row.state.num_prompt_tokens :], return_counts=True)
    logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def top_logprobs(logprobs: Tensor, actual: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The actual token and the most likely ones of each row.

    Args:
        logprobs: [L, vocab_size], float32.
        actual: [L], int64.
        num_top: Candidates besides the actual token.

    Returns:
        (values [L, num_top + 1], ids [L, num_top + 1], ranks of the actual tokens [L], from 1).
    """
    values = logprobs.gather(1, actual[:, None])
    ranks = (logprobs > values).sum(dim=1) + 1
    if num_top:
        top_values, top_ids = logprobs.topk(num_top, dim=1)
        return torch.cat([values, top_values], dim=1), torch.cat([actual[:, None], top_ids], dim=1), ranks
    return values, actual[:, None], ranks


def position_logprobs(parts: tuple[Tensor, Tensor, Tensor], counts: Sequence[int]) -> list[PositionLogprobs]:
    """Host values of `top_logprobs`, each row cut to its own number of candidates.

    Args:
        parts: What `top_logprobs` returned.
        counts: Candidates that each row asked for.
    """
    values, ids, ranks = (part.tolist() for part in parts)
    return [
        PositionLogprobs(tuple(ids[i][: count + 1]), tuple(values[i][: count + 1]), ranks[i])
        for i, count in enumerate(counts)
    ]

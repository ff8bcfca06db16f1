"""L3: log-probabilities of outputs and prompts, against those of the golden's logits, under every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.outputs import PositionLogprobs
from core_conformance.checks import check
from core_conformance.engines.goldens import golden_logits, prompt_of
from core_conformance.engines.rig import golden_set, tokens_of
from core_conformance.engines.schedules import scheduled
from core_conformance.subject import Mismatch, Subject
from core_conformance.tolerance import LOGIT_DELTA

_MODELS = ("llama", "gemma3")
_TOP = 4
_BENDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 5},
    {"logit_bias": {7: 3.0, 99: -50.0}, "repetition_penalty": 1.5},
    {"allowed_token_ids": tuple(range(0, 256, 3))},
)
"""What bends the choice of tokens: log-probabilities are the model's own all the same."""


@check("L3/logprobs", [f"{m}-{s}" for m in _MODELS for s in ("default", "chunks", "recompute", "swap", "drafts")])
def test_of_outputs(subject: Subject, variant: str) -> None:
    """One entry a token, the token's own first, then the most likely ones in order, and the rank of its own."""
    model, schedule = variant.split("-", 1)
    goldens = golden_set(model, subject.block_size, 6)
    with scheduled(subject, model, schedule, goldens) as rig:
        counts = [_TOP, 0, _TOP, 1]
        pairs = list(zip(goldens, counts, strict=True))
        ids = [
            rig.start(golden.prompt, max_tokens=6, logprobs=count, **bend)
            for (golden, count), bend in zip(pairs, _BENDS, strict=True)
        ]
        news = rig.finish()
    for (golden, count), request_id in zip(pairs, ids, strict=True):
        tokens = tokens_of(news[request_id])
        entries = [entry for output in news[request_id] for entry in output.new_logprobs]
        if len(entries) != len(tokens):
            raise Mismatch(f"{len(entries)} entries of log-probabilities for {len(tokens)} tokens")
        exact = _logprobs(model, (*golden.prompt, *tokens))[len(golden.prompt) - 1 : -1]
        _compare(subject, f"output of {model}, {schedule}", tokens, entries, exact, count)


@check("L3/prompt-logprobs", [f"{m}-{s}" for m in _MODELS for s in ("default", "chunks", "recompute", "drafts")])
def test_of_prompts(subject: Subject, variant: str) -> None:
    """Every position but the first, once, with the first output; a warm prefix cache leaves none out."""
    model, schedule = variant.split("-", 1)
    prompts = [prompt_of(length, seed=12) for length in (1, subject.block_size + 1, 2 * subject.block_size + 3)]
    with scheduled(subject, model, schedule) as rig:
        for what in ("cold cache", "warm cache"):
            ids = [rig.start(prompt, max_tokens=3, prompt_logprobs=_TOP) for prompt in prompts]
            other = rig.start(prompts[-1], max_tokens=3)
            news = rig.finish()
            assert not any(output.prompt_logprobs for output in news[other]), "prompt log-probabilities nobody wanted"
            for prompt, request_id in zip(prompts, ids, strict=True):
                told = [output.prompt_logprobs for output in news[request_id]]
                first = told[0]
                if first is None or any(entry is not None for entry in told[1:]):
                    raise Mismatch("prompt log-probabilities must come once, with the first output")
                if len(first) != len(prompt) or first[0] is not None or None in first[1:]:
                    raise Mismatch(f"{len(first)} entries for a prompt of {len(prompt)}; the first alone must be None")
                entries = [entry for entry in first if entry is not None]
                exact = _logprobs(model, prompt)[:-1]
                _compare(subject, f"prompt of {model}, {schedule}, {what}", prompt[1:], entries, exact, _TOP)


def _logprobs(model: str, tokens: tuple[int, ...]) -> Tensor:
    return golden_logits(model, tokens, torch.float64).log_softmax(-1)


def _compare(
    subject: Subject, what: str, tokens: Sequence[int], got: Sequence[PositionLogprobs], exact: Tensor, count: int
) -> None:
    """Each value within 2 delta; which tokens are the most likely ones, and the rank, as far as delta can tell."""
    bound = 2 * LOGIT_DELTA
    for place, (token, entry, row) in enumerate(zip(tokens, got, exact, strict=True)):
        if entry.token_ids[0] != token or not len(entry.token_ids) == len(entry.logprobs) == count + 1:
            raise Mismatch(
                f"log-probabilities, {what}: entry {place} is of tokens {entry.token_ids}, expected token {token} and "
                f"then the {count} most likely ones"
            )
        values = torch.tensor(entry.logprobs, dtype=torch.float64)
        error = float((values - row[list(entry.token_ids)]).abs().max())
        best = row.topk(max(count, 1)).values[:count]
        shortfall = float((best - row[list(entry.token_ids[1:])]).abs().max()) if count else 0.0
        least, most = int((row > row[token] + bound).sum()) + 1, int((row > row[token] - bound).sum())
        if subject.ratio is None or error / bound > subject.ratio:
            subject.err, subject.bound, subject.ratio = error, bound, error / bound
        if error > bound or shortfall > bound or not least <= entry.actual_rank <= most:
            raise Mismatch(
                f"log-probabilities, {what}: entry {place} says {entry.logprobs} of tokens {entry.token_ids}, rank "
                f"{entry.actual_rank}; expected {row[list(entry.token_ids)].tolist()}, rank {least} to {most}; "
                f"bound {bound:.3g}"
            )

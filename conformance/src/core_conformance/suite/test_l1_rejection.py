"""L1: which draft tokens stay and what is drawn after them, exactly, by the shared random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.backend.ops import RejectionSampleArgs, RejectionSampleOp
from core.backend.philox import ACCEPT_STREAM, GUMBEL_STREAM, RECOVER_STREAM, gumbel, uniform
from core.spec import DType
from core_conformance.checks import check
from core_conformance.diagnosis import Suspects
from core_conformance.operations.cache_memory import int32
from core_conformance.subject import Subject
from core_conformance.tolerance import SAMPLE_MARGIN

_ROWS = 24


@dataclass
class _Rows:
    """Requests with drafts.

    Args:
        args: The record, on the host.
        steps: Draft tokens that a request may have.
    """

    args: RejectionSampleArgs
    steps: int

    def expected(self, *, certain: bool = False, stream: int = RECOVER_STREAM, past: int = 0) -> tuple[Tensor, Tensor]:
        """(tokens [R, steps + 1], which rows no honest rounding can turn), request by request, float64.

        Args:
            certain: The drafter's probabilities are taken for 1.
            stream: Of the draw after a refusal.
            past: Draft tokens that are accepted beyond the first refusal.
        """
        found = torch.full((len(self.args.logits), self.steps + 1), -1, dtype=torch.int32)
        clear = torch.ones(len(found), dtype=torch.bool)
        for row in range(len(found)):
            tokens, margin = self._row(row, certain, stream, past)
            found[row, : len(tokens)] = int32(tokens)
            clear[row] = margin > SAMPLE_MARGIN
        return found, clear

    def _row(self, row: int, certain: bool, stream: int, past: int) -> tuple[list[int], float]:
        a, tokens, margin = self.args, [], 1.0
        heat = float(a.temperature[row])
        for step in range(int(a.num_draft_tokens[row])):
            logits, draft = a.logits[row, step].double(), int(a.draft_token_ids[row, step])
            q = torch.zeros_like(logits)
            q[draft] = 1.0
            if a.draft_probs is not None and not certain:
                q = a.draft_probs[row, step].double()
            if heat == 0:
                stays, near = draft == int(logits.argmax()), _gap(logits)
                rest = logits
            else:
                p = torch.softmax(logits / max(heat, 1e-5), 0)
                u = float(uniform(a.seeds[row], a.positions[row].long() + step, torch.tensor(draft), ACCEPT_STREAM))
                stays, near = u * float(q[draft]) < float(p[draft]), abs(u * float(q[draft]) - float(p[draft]))
                rest = (p - q).clamp(min=0).log()
            margin = min(margin, near)
            if stays or past > 0:
                past -= not stays
                tokens.append(draft)
                continue
            last, near = self._draw(row, rest, step, stream, heat)
            return [*tokens, last], min(margin, near)
        end = len(tokens)
        logits = a.logits[row, end].double()
        last, near = self._draw(row, logits / max(heat, 1e-5) if heat else logits, end, GUMBEL_STREAM, heat)
        return [*tokens, last], min(margin, near)

    def _draw(self, row: int, scores: Tensor, step: int, stream: int, heat: float) -> tuple[int, float]:
        if heat:
            position = self.args.positions[row].long() + step
            scores = scores + gumbel(self.args.seeds[row], position, torch.arange(len(scores)), stream)
        return int(scores.argmax()), _gap(scores)


def _gap(scores: Tensor) -> float:
    best = scores.topk(2).values
    return float(best[0] - best[1])


def _rows(dice: torch.Generator, steps: int, vocab: int, temperature: float, probs: bool) -> _Rows:
    logits = torch.randn(_ROWS, steps + 1, vocab, generator=dice) * 1.5
    q = (logits[:, :steps] + torch.randn(_ROWS, steps, vocab, generator=dice)).softmax(-1)
    drafts = (
        torch.multinomial(q.flatten(0, 1), 1, generator=dice).view(_ROWS, steps) if steps else torch.zeros(_ROWS, 0)
    )
    args = RejectionSampleArgs(
        logits=logits,
        draft_token_ids=drafts.to(torch.int32),
        num_draft_tokens=int32([row % (steps + 1) for row in range(_ROWS)]),
        temperature=torch.full((_ROWS,), temperature),
        seeds=torch.randint(-(2**62), 2**62, (_ROWS,), generator=dice),
        positions=torch.randint(0, 4096, (_ROWS,), generator=dice, dtype=torch.int32),
        draft_probs=q if probs else None,
    )
    # What lies behind a request's drafts counts for nothing.
    for row, count in enumerate(args.num_draft_tokens.tolist()):
        args.logits[row, count + 1 :] = float("nan")
        args.draft_token_ids[row, count:] = -1
    return _Rows(args, steps)


def _check(subject: Subject, rows: _Rows, vocab: int, least: int = _ROWS // 3) -> None:
    args, put = rows.args, subject.put
    features = frozenset() if args.draft_probs is None else frozenset({"draft_probs"})
    op = RejectionSampleOp(dtype=DType.FLOAT32, vocab_size=vocab, num_spec_tokens=rows.steps, features=features)
    sample = subject.bind(op)
    tokens, clear = rows.expected()
    assert int(clear.sum()) >= least, "too few rows are clear of every boundary: the check shows nothing"
    given = RejectionSampleArgs(
        logits=put(args.logits),
        draft_token_ids=put(args.draft_token_ids),
        num_draft_tokens=put(args.num_draft_tokens),
        temperature=put(args.temperature),
        seeds=put(args.seeds),
        positions=put(args.positions),
        draft_probs=None if args.draft_probs is None else put(args.draft_probs),
    )
    got, valid = (subject.get(x) for x in sample(given))
    subject.equal(op, got[clear], tokens[clear], "token ids", suspects=_suspects(rows, clear))
    counts = (tokens >= 0).sum(-1).to(torch.int32)
    subject.equal(op, valid[clear], counts[clear], "numbers of valid tokens")


def _suspects(rows: _Rows, clear: Tensor) -> Suspects:
    def suspects(got: Tensor) -> dict[str, Tensor]:
        return {
            "drafts: one is accepted past the first refusal": rows.expected(past=1)[0][clear].double(),
            "drafts: the drafter's probabilities do not count": rows.expected(certain=True)[0][clear].double(),
            "stream: the draw after a refusal uses stream 0": rows.expected(stream=GUMBEL_STREAM)[0][clear].double(),
        }

    return suspects


@check("L1/rejection_sample", ["certain", "probabilities", "hot", "cold", "vocab-301"])
def test_drafts_and_draws(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Drafts of every length, from a drafter that was certain and from one with probabilities."""
    heat = {"hot": 3.0, "cold": 0.3}.get(variant, 1.0)
    vocab = 301 if variant == "vocab-301" else 33
    _check(subject, _rows(dice, 3, vocab, heat, variant != "certain"), vocab)


@check("L1/rejection_sample/greedy", ["certain", "probabilities"])
def test_greedy_drafts(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Temperature 0: a draft stays where it is the most likely token, and the most likely token follows."""
    rows = _rows(dice, 3, 33, 0.0, variant == "probabilities")
    for row in range(0, _ROWS, 2):  # half of the drafts are what the target would have said
        for step in range(int(rows.args.num_draft_tokens[row])):
            rows.args.draft_token_ids[row, step] = int(rows.args.logits[row, step].argmax())
    _check(subject, rows, 33)


@check("L1/rejection_sample/equal")
def test_equal_distributions_accept_every_draft(subject: Subject, dice: torch.Generator) -> None:
    """Where the drafter drew from the target's own probabilities nearly doubled, nothing is refused; and forbidden
    tokens are never accepted.
    """
    rows = _rows(dice, 2, 17, 1.0, True)
    assert rows.args.draft_probs is not None
    target = rows.args.logits[:, :2].softmax(-1)
    rows.args.draft_probs.copy_(target.nan_to_num() * 0.5)
    for row in range(0, _ROWS, 3):  # the target forbids the first draft
        if int(rows.args.num_draft_tokens[row]):
            rows.args.logits[row, 0, int(rows.args.draft_token_ids[row, 0])] = float("-inf")
    _check(subject, rows, 17)


@check("L1/rejection_sample/no-drafts")
def test_without_drafts_it_samples(subject: Subject, dice: torch.Generator) -> None:
    """No draft token at all: one token a row, drawn as `sample` draws it."""
    _check(subject, _rows(dice, 0, 33, 1.0, False), 33)


@check("L1/rejection_sample/mixed")
def test_greedy_and_random_rows_together(subject: Subject, dice: torch.Generator) -> None:
    """Temperatures of 0 and above in one batch."""
    rows = _rows(dice, 2, 33, 1.0, True)
    rows.args.temperature[::3] = 0.0
    _check(subject, rows, 33)

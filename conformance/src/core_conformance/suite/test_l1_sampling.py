"""L1: from logits to tokens, exactly; the decode state; masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import (
    AdvanceArgs,
    AdvanceOp,
    ApplyTokenBitmaskArgs,
    ApplyTokenBitmaskOp,
    SampleArgs,
    SampleOp,
)
from core.backend.philox import GUMBEL_STREAM, gumbel
from core.backend.reference.sampling import kept, tempered
from core.spec import DType
from core_conformance.checks import check
from core_conformance.operations.cache_memory import int32
from core_conformance.subject import Subject, oracle
from core_conformance.tolerance import SAMPLE_MARGIN

_FILTERS = ("top_k", "top_p", "min_p")
_ROWS = 24


def _put(subject: Subject, args: SampleArgs) -> SampleArgs:
    moved = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    put: dict[str, Any] = {name: None if x is None else subject.put(x) for name, x in moved.items()}
    return SampleArgs(**put)


def _args(dice: torch.Generator, vocab: int, features: tuple[str, ...], temperature: float) -> SampleArgs:
    rows = _ROWS
    values: dict[str, Any] = {
        "top_k": torch.randint(0, 12, (rows,), generator=dice, dtype=torch.int32),
        "top_p": torch.rand(rows, generator=dice) * 0.9 + 0.1,
        "min_p": torch.rand(rows, generator=dice) * 0.3,
    }
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=dice)
    return SampleArgs(
        logits=torch.randn(rows, vocab, generator=dice) * 3,
        temperature=torch.full((rows,), temperature),
        seeds=seeds,
        positions=torch.randint(0, 4096, (rows,), generator=dice, dtype=torch.int32),
        **{name: values[name] for name in features},
    )


def _clear(args: SampleArgs) -> Tensor:
    """Rows that no honest rounding can turn: clear of every filter's boundary, and with a clear winner."""
    z = tempered(args.logits, args.temperature).double()
    rows, vocab = z.shape
    falling = z.sort(-1, descending=True).values
    keep = kept(z, args.top_k, args.top_p, args.min_p)
    probs = z.softmax(-1).sort(-1, descending=True).values
    far = torch.ones(rows, dtype=torch.bool)
    if args.top_p is not None:
        limit = args.top_p.double()[:, None]
        inside = torch.arange(vocab) < (args.top_k[:, None] if args.top_k is not None else vocab)
        if args.top_k is not None:
            inside = inside | (args.top_k[:, None] <= 0)
        probs = torch.where(inside, falling, -torch.inf).softmax(-1)
        far &= ((probs.cumsum(-1) - limit).abs() > SAMPLE_MARGIN / 10).all(-1)
    if args.min_p is not None:
        far &= ((probs - args.min_p.double()[:, None] * probs[:, :1]).abs() > SAMPLE_MARGIN / 100 * probs[:, :1]).all(
            -1
        )
    noise = gumbel(args.seeds[:, None], args.positions[:, None].long(), torch.arange(vocab)[None], GUMBEL_STREAM)
    best = torch.where(keep, z + noise, -torch.inf).topk(2, dim=-1).values
    return far & (best[:, 0] - best[:, 1] > SAMPLE_MARGIN)


@check("L1/sample/greedy", mandatory=True)
def test_greedy_takes_the_lowest_of_the_most_likely(subject: Subject, dice: torch.Generator) -> None:
    """Temperature 0: the largest logit; among equals the lowest id; the last id is no sentinel."""
    op = SampleOp(dtype=DType.FLOAT32, vocab_size=301)
    logits = torch.randn(6, 301, generator=dice)
    logits[0, [17, 150, 300]] = 9.0
    logits[1] = 0.0
    logits[2, 300] = 20.0
    logits[3] = float("-inf")
    logits[3, 77] = -50.0
    args = SampleArgs(
        logits=logits, temperature=torch.zeros(6), seeds=torch.arange(6), positions=torch.zeros(6, dtype=torch.int32)
    )
    expected = int32([17, 0, 300, 77, int(logits[4].argmax()), int(logits[5].argmax())])
    subject.equal(op, subject.bind(op)(_put(subject, args)), expected)


@check("L1/sample/draws", ["vocab-300", "vocab-5003", "hot", "cold"])
def test_draws_are_those_of_the_shared_generator(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """For fixed seeds and positions the token is the same on every backend."""
    vocab = {"vocab-5003": 5003}.get(variant, 300)
    temperature = {"hot": 3.0, "cold": 0.2}.get(variant, 1.0)
    _check_draws(subject, _args(dice, vocab, (), temperature), vocab, ())


@check("L1/sample/filtered", [*_FILTERS, "all"])
def test_filtered_draws(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """top_k, top_p and min_p, each alone and all together, another value each row; once with logits that are nearly
    equal, so that a token too many is drawn as often as any other.
    """
    features = _FILTERS if variant == "all" else (variant,)
    args = _args(dice, 300, features, 1.2)
    _check_draws(subject, args, 300, features)
    if variant in ("top_k", "all"):
        _check_draws(subject, dataclasses.replace(args, logits=args.logits * 0.02), 300, features)


@check("L1/sample/neutral")
def test_neutral_filters_keep_all(subject: Subject, dice: torch.Generator) -> None:
    """top_k 0, top_p 1 and min_p 0 change nothing."""
    args = _args(dice, 300, (), 1.0)
    neutral = dataclasses.replace(
        args,
        top_k=torch.zeros(_ROWS, dtype=torch.int32),
        top_p=torch.ones(_ROWS),
        min_p=torch.zeros(_ROWS),
    )
    rows = _clear(args)
    plain = SampleOp(dtype=DType.FLOAT32, vocab_size=300)
    op = dataclasses.replace(plain, features=frozenset(_FILTERS))
    out = subject.get(subject.bind(op)(_put(subject, neutral)))
    subject.equal(op, out[rows], oracle(plain)(args)[rows])


@check("L1/sample/mixed")
def test_rows_do_not_show_in_each_other(subject: Subject, dice: torch.Generator) -> None:
    """Greedy and random rows in one batch: each as alone."""
    op = SampleOp(dtype=DType.FLOAT32, vocab_size=300)
    args = _args(dice, 300, (), 1.0)
    args.temperature[::3] = 0.0
    rows = _clear(dataclasses.replace(args, temperature=args.temperature.clamp(min=1.0)))
    sample = subject.bind(op)
    together = subject.get(sample(_put(subject, args)))
    for row in torch.where(rows)[0].tolist():
        tensors = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
        parts: dict[str, Any] = {name: None if x is None else x[row : row + 1] for name, x in tensors.items()}
        one = SampleArgs(**parts)
        subject.equal(op, together[row : row + 1], subject.get(sample(_put(subject, one))), f"row {row} alone")


@check("L1/apply_token_bitmask", ["300", "32", "33"])
def test_bitmask(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Exactly the tokens without a bit become -inf, in place; a last word that is not full counts to its end."""
    vocab = int(variant)
    op = ApplyTokenBitmaskOp(dtype=DType.FLOAT32, vocab_size=vocab)
    allowed = torch.rand(4, vocab, generator=dice) < 0.5
    allowed[1], allowed[2] = True, False
    words = torch.zeros(4, -(-vocab // 32), dtype=torch.int64)
    for token in range(vocab):
        words[:, token // 32] |= allowed[:, token].long() << (token % 32)
    bitmask = words.to(torch.uint32).view(torch.int32)
    logits = torch.randn(4, vocab, generator=dice)
    there = subject.put(logits)
    subject.bind(op)(ApplyTokenBitmaskArgs(logits=there, bitmask=subject.put(bitmask)))
    subject.equal(op, there, torch.where(allowed, logits, torch.tensor(float("-inf"))))


@check("L1/advance", ["one-token", "drafts"])
def test_advance(subject: Subject, variant: str) -> None:
    """Ids, positions, lengths and slots of two groups move by what was accepted; 0 leaves a row; no block, no slot."""
    drafts = 2 if variant == "drafts" else 0
    op = AdvanceOp(dtype=DType.FLOAT32, block_sizes=(4, 8), num_spec_tokens=drafts)
    accepted = int32([1, drafts + 1, 0, 1])
    state = {"token_ids": [5, 6, 7, 8], "positions": [2, 3, 9, 7], "seq_lens": [3, 4, 10, 8]}
    sampled = torch.arange(100, 100 + 4 * (drafts + 1), dtype=torch.int32).view(4, drafts + 1)
    tables = (int32([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 0]]), int32([[20, 21], [22, 23], [24, 25], [26, 0]]))
    slots = [int32([-9] * 4), int32([-9] * 4)]
    moved = {name: subject.put(int32(values)) for name, values in state.items()}
    there = [subject.put(x) for x in slots]
    args = AdvanceArgs(
        **moved,
        block_tables=tuple(subject.put(table) for table in tables),
        slots=tuple(there),
        sampled=subject.put(sampled),
        num_accepted=subject.put(accepted),
    )
    subject.bind(op)(args)
    counts = accepted.tolist()
    positions = [p + n for p, n in zip(state["positions"], counts, strict=True)]
    ids = [int(sampled[r, n - 1]) if n else state["token_ids"][r] for r, n in enumerate(counts)]
    subject.equal(op, moved["token_ids"], int32(ids), "token_ids")
    subject.equal(op, moved["positions"], int32(positions), "positions")
    lens = [length + n for length, n in zip(state["seq_lens"], counts, strict=True)]
    subject.equal(op, moved["seq_lens"], int32(lens), "seq_lens")
    for group, (table, size) in enumerate(zip(tables, op.block_sizes, strict=True)):
        expected = [_slot(table[r].tolist(), positions[r], size) if n else -9 for r, n in enumerate(counts)]
        subject.equal(op, there[group], int32(expected), f"slots of group {group} ")


def _slot(blocks: list[int], position: int, size: int) -> int:
    index = position // size
    block = blocks[index] if index < len(blocks) else 0
    return block * size + position % size if block else -1


def _check_draws(subject: Subject, args: SampleArgs, vocab: int, features: tuple[str, ...]) -> None:
    op = SampleOp(dtype=DType.FLOAT32, vocab_size=vocab, features=frozenset(features))
    rows = _clear(args)
    assert int(rows.sum()) >= _ROWS // 3, "too few rows are clear of every boundary: the check shows nothing"
    expected = oracle(op)(dataclasses.replace(args, logits=args.logits.clone()))
    out = subject.get(subject.bind(op)(_put(subject, args)))
    subject.equal(op, out[rows], expected[rows])

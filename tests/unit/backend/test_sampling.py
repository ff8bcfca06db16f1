"""`sample`, `apply_token_bitmask`, `rejection_sample` and `advance` of the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from bare import bound
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import i32
from torch import Tensor

from core.backend.ops import (
    AdvanceArgs,
    AdvanceOp,
    ApplyTokenBitmaskArgs,
    ApplyTokenBitmaskOp,
    RejectionSampleArgs,
    RejectionSampleOp,
    SampleArgs,
    SampleOp,
)
from core.backend.philox import gumbel, uniform
from core.backend.reference.sampling import kept
from core.spec import DType


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """The statistic in standard deviations above its mean, over cells that expect at least 5."""
    expected = probs.double() * counts.sum()
    big = expected >= 5
    statistic = ((counts[big] - expected[big]) ** 2 / expected[big]).sum().item()
    freedom = int(big.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def sample_rows(logits: Tensor, temperature: float, seed: int, **filters: float) -> Tensor:
    """One token a row, the rows at different positions of one seed."""
    rows, vocab = logits.shape
    op = SampleOp(dtype=DType.FLOAT32, vocab_size=vocab, features=frozenset(filters))
    kinds = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    extra: dict[str, Any] = {name: torch.full((rows,), value, dtype=kinds[name]) for name, value in filters.items()}
    args = SampleArgs(
        logits=logits.clone(),
        temperature=torch.full((rows,), temperature),
        seeds=torch.full((rows,), seed),
        positions=torch.arange(rows, dtype=torch.int32),
        **extra,
    )
    out: Tensor = bound(op)(args)
    assert out.dtype == torch.int32 and out.shape == (rows,)
    return out


# -- sample ----------------------------------------------------------------------------------------------------------


def test_zero_temperature_takes_the_lowest_of_the_most_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-1.0, -1.0, -1.0, -1.0], [0.0, 0.0, -math.inf, 7.0]])
    assert sample_rows(logits, 0.0, 1, top_k=3, top_p=0.1).tolist() == [1, 0, 3]


def test_the_token_is_the_argmax_of_scaled_logits_and_shared_noise() -> None:
    logits = torch.randn(20, 50) * 3
    out = sample_rows(logits, 0.7, -12345)
    for row in range(20):
        noise = gumbel(torch.tensor(-12345), torch.tensor(row), torch.arange(50), 0)
        assert out[row] == (logits[row] / torch.tensor(0.7) + noise).argmax()


def test_rows_mix_greedy_and_random() -> None:
    logits = torch.randn(4, 30)
    args = SampleArgs(
        logits=logits,
        temperature=torch.tensor([0.0, 1.0, 0.0, 1.0]),
        seeds=torch.tensor([1, 2, 3, 4]),
        positions=i32([9, 8, 7, 6]),
    )
    out = bound(SampleOp(dtype=DType.FLOAT32, vocab_size=30))(args)
    assert out[0] == logits[0].argmax() and out[2] == logits[2].argmax()
    for row in (1, 3):
        noise = gumbel(args.seeds[row], args.positions[row].long(), torch.arange(30), 0)
        assert out[row] == (logits[row] + noise).argmax()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.randn(12)
    draws = sample_rows(logits.expand(8_000, 12), temperature, 77)
    counts = torch.bincount(draws.long(), minlength=12)
    assert abs(chi_square(counts, (logits.double() / temperature).softmax(-1))) < 4


def test_filtered_draws_follow_the_softmax_of_what_is_kept() -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -3.0])
    draws = sample_rows(logits.expand(8_000, 7), 1.0, 5, top_k=5, top_p=0.8, min_p=0.3)
    counts = torch.bincount(draws.long(), minlength=7)
    assert counts[3:].sum() == 0
    probs = torch.where(torch.arange(7) < 3, logits, -math.inf).double().softmax(-1)
    assert abs(chi_square(counts[:3], probs[:3])) < 4


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.randn(5000, 8)
    logits[:, [1, 6]] = -math.inf
    assert not set(sample_rows(logits, 3.0, 8).tolist()) & {1, 6}


def test_other_rows_do_not_show() -> None:
    logits = torch.randn(6, 40)
    whole = sample_rows(logits, 1.0, 3, top_k=7, top_p=0.9)
    assert torch.equal(sample_rows(logits[:2], 1.0, 3, top_k=7, top_p=0.9), whole[:2])


def kept_by_hand(z: np.ndarray[Any, Any], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn, from the words of the definition, float32 sums in falling order."""
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    order = order[:top_k] if top_k else order
    weights = np.exp((z[order] - z[order[0]]).astype(np.float64))
    probs = weights / weights.sum()
    head: list[tuple[int, float]] = []
    for token, prob in zip(order, probs, strict=True):
        if head and sum(p for _, p in head) >= top_p and top_p < 1:
            break
        head.append((token, prob))
    return {token for token, prob in head if prob >= min_p * probs[0]}


@settings(max_examples=200, deadline=None)
@given(
    # Multiples of 1/4 give ties and keep sums away from the limits.
    st.lists(st.integers(-16, 16), min_size=1, max_size=20),
    st.integers(0, 22),
    st.sampled_from([0.0, 0.0371, 0.313, 0.517, 0.913, 0.991, 1.0]),
    st.sampled_from([0.0, 0.0123, 0.21, 0.77, 1.0]),
)
def test_kept_sets_equal_those_by_hand(quarters: list[int], top_k: int, top_p: float, min_p: float) -> None:
    z = torch.tensor([quarters], dtype=torch.float32) / 4
    mask = kept(z, i32([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    assert set(mask[0].nonzero()[:, 0].tolist()) == kept_by_hand(z[0].numpy(), top_k, top_p, min_p)


def test_neutral_filters_keep_all() -> None:
    z = torch.randn(3, 1000) * 10
    assert kept(z, i32([0] * 3), torch.ones(3), torch.zeros(3)).all()


# -- apply_token_bitmask ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70])
def test_bitmask_forbids_exactly_the_tokens_without_a_bit(vocab: int) -> None:
    allowed = torch.rand(3, vocab) < 0.5
    words = torch.zeros(3, -(-vocab // 32), dtype=torch.int64)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= 1 << token % 32
    bitmask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    logits = torch.randn(3, vocab)
    before = logits.clone()
    op = ApplyTokenBitmaskOp(dtype=DType.FLOAT32, vocab_size=vocab)
    assert bound(op)(ApplyTokenBitmaskArgs(logits=logits, bitmask=bitmask)) is None
    assert torch.equal(logits, torch.where(allowed, before, -math.inf))


# -- rejection_sample ------------------------------------------------------------------------------------------------


def reject(
    logits: Tensor,
    drafts: list[list[int]],
    counts: list[int],
    temperature: float,
    *,
    probs: Tensor | None = None,
    seed: int = 4,
) -> tuple[Tensor, Tensor]:
    rows, width, vocab = logits.shape
    op = RejectionSampleOp(
        dtype=DType.FLOAT32,
        vocab_size=vocab,
        num_spec_tokens=width - 1,
        features=frozenset() if probs is None else frozenset({"draft_probs"}),
    )
    args = RejectionSampleArgs(
        logits=logits.clone(),
        draft_token_ids=i32(drafts).view(rows, width - 1),
        num_draft_tokens=i32(counts),
        temperature=torch.full((rows,), temperature),
        seeds=torch.full((rows,), seed),
        positions=torch.arange(rows, dtype=torch.int32) * 10,
        draft_probs=probs,
    )
    tokens, valid = bound(op)(args)
    assert tokens.dtype == valid.dtype == torch.int32 and tokens.shape == (rows, width)
    return tokens, valid


def test_greedy_accepts_the_head_that_the_target_would_have_said() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4], [3, 1, 4], [3, 1, 4], [3, 1, 4]]), 5).float()
    tokens, valid = reject(logits, [[3, 1], [3, 2], [0, 1], [3, 1]], [2, 2, 2, 1], 0.0)
    assert tokens.tolist() == [[3, 1, 4], [3, 1, -1], [3, -1, -1], [3, 1, -1]]
    assert valid.tolist() == [3, 2, 1, 2]


def test_without_drafts_it_is_sample() -> None:
    logits = torch.randn(50, 1, 30)
    tokens, valid = reject(logits, [[] for _ in range(50)], [0] * 50, 1.0, seed=6)
    assert valid.tolist() == [1] * 50
    args = SampleArgs(
        logits=logits[:, 0],
        temperature=torch.ones(50),
        seeds=torch.full((50,), 6),
        positions=torch.arange(50, dtype=torch.int32) * 10,
    )
    assert torch.equal(tokens[:, 0], bound(SampleOp(dtype=DType.FLOAT32, vocab_size=30))(args))


def test_every_token_by_hand() -> None:
    rows, steps, vocab = 300, 3, 6
    logits, probs = torch.randn(rows, steps + 1, vocab) * 1.5, torch.randn(rows, steps, vocab).softmax(-1)
    drafts = torch.multinomial(probs.flatten(0, 1), 1).view(rows, steps)
    counts = [row % (steps + 1) for row in range(rows)]
    tokens, valid = reject(logits, drafts.tolist(), counts, 0.8, probs=probs)
    target = (logits.double() / 0.8).softmax(-1)
    lengths = set()
    for row in range(rows):
        seed, ids = torch.tensor(4), torch.arange(vocab)
        expected: list[int] = []
        for i in range(counts[row]):
            token, position = int(drafts[row, i]), torch.tensor(row * 10 + i)
            u = uniform(seed, position, torch.tensor(token), 1).item()
            if u * probs[row, i, token] >= target[row, i, token]:
                rest = (target[row, i] - probs[row, i].double()).clamp(min=0)
                expected.append(int((rest.log() + gumbel(seed, position, ids, 2)).argmax()))
                break
            expected.append(token)
        else:
            position = torch.tensor(row * 10 + counts[row])
            expected.append(int((target[row, counts[row]].log() + gumbel(seed, position, ids, 0)).argmax()))
        assert tokens[row, : len(expected)].tolist() == expected and valid[row] == len(expected)
        assert (tokens[row, len(expected) :] == -1).all()
        lengths.add(len(expected))
    assert lengths == {1, 2, 3, 4}


@pytest.mark.parametrize("certain", [False, True])
def test_the_first_token_follows_the_target_whatever_the_drafter(certain: bool) -> None:
    rows, vocab = 8_000, 6
    target, drafter = torch.randn(vocab), torch.randn(vocab).softmax(-1)
    logits = target.expand(rows, 2, vocab)
    drafts = torch.full((rows, 1), 2) if certain else torch.multinomial(drafter, rows, replacement=True)[:, None]
    probs = None if certain else drafter.expand(rows, 1, vocab)
    tokens, _ = reject(logits, drafts.tolist(), [1] * rows, 1.0, probs=probs)
    counts = torch.bincount(tokens[:, 0].long(), minlength=vocab)
    assert abs(chi_square(counts, target.double().softmax(-1))) < 4


def test_a_draft_that_the_target_forbids_is_refused() -> None:
    logits = torch.zeros(200, 2, 4)
    logits[:, :, 1] = -math.inf
    tokens, valid = reject(logits, [[1]] * 200, [1] * 200, 1.0)
    assert (valid == 1).all() and not (tokens == 1).any()


def test_equal_distributions_accept_all() -> None:
    logits = torch.randn(100, 3, 9)
    probs = logits[:, :2].softmax(-1)
    drafts = torch.multinomial(probs.flatten(0, 1), 1).view(100, 2)
    _, valid = reject(logits, drafts.tolist(), [2] * 100, 1.0, probs=probs)
    assert (valid == 3).all()


# -- advance ---------------------------------------------------------------------------------------------------------


def test_advance_moves_each_row_by_its_accepted_tokens() -> None:
    tables = (i32([[3, 5, 7], [2, 0, 0], [9, 8, 6], [4, 1, 0]]), i32([[1, 2], [5, 6], [0, 4], [7, 8]]))
    state = AdvanceArgs(
        token_ids=i32([10, 11, 12, 13]),
        positions=i32([3, 2, 8, 7]),
        seq_lens=i32([4, 3, 9, 8]),
        block_tables=tables,
        slots=(i32([15, 10, 24, -1]), i32([3, 42, 32, -1])),
        sampled=i32([[20, 21, 22], [30, -1, -1], [40, 41, -1], [-1, -1, -1]]),
        num_accepted=i32([3, 1, 2, 0]),
    )
    frozen = [table.clone() for table in tables]
    op = AdvanceOp(dtype=DType.FLOAT32, block_sizes=(4, 8), num_spec_tokens=2)
    assert bound(op)(state) is None
    assert state.token_ids.tolist() == [22, 30, 41, 13]
    assert state.positions.tolist() == [6, 3, 10, 7]
    assert state.seq_lens.tolist() == [7, 4, 11, 8]
    assert state.slots[0].tolist() == [5 * 4 + 2, 2 * 4 + 3, 6 * 4 + 2, -1]
    assert state.slots[1].tolist() == [1 * 8 + 6, 5 * 8 + 3, 4 * 8 + 2, -1]
    assert all(torch.equal(table, old) for table, old in zip(tables, frozen, strict=True))


def test_advance_gives_no_slot_where_there_is_no_block() -> None:
    state = AdvanceArgs(
        token_ids=i32([1, 1]),
        positions=i32([3, 7]),
        seq_lens=i32([4, 8]),
        block_tables=(i32([[3, 0], [4, 5]]),),
        slots=(i32([15, 23]),),
        sampled=i32([[2], [2]]),
        num_accepted=i32([1, 1]),
    )
    bound(AdvanceOp(dtype=DType.FLOAT32, block_sizes=(4,)))(state)
    assert state.slots[0].tolist() == [-1, -1]

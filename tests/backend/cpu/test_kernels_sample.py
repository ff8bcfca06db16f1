"""sample: the shared Philox noise, filters without a sort against filters with one, ties, many rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core_cpu import kernels

MASK = 0xFFFFFFFF


def philox_word(seed: int, position: int, index: int) -> int:
    """First output word of Philox4x32-10, in plain integers (Salmon et al., 2011)."""
    counter, key = [position, index, 0, 0], [seed & MASK, (seed >> 32) & MASK]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & MASK, (a >> 32) ^ counter[3] ^ key[1], a & MASK]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter[0]


def noise(seed: int, position: int, ids: Tensor) -> Tensor:
    words = torch.tensor([philox_word(seed, position, i) for i in ids.tolist()], dtype=torch.float64)
    u = (torch.floor(words / 512) + 0.5) / 2**23
    return -torch.log(-torch.log(u))


def filtered(z: Tensor, k: int, p: float, min_p: float) -> Tensor:
    """Ids that stay, by sorting, as the operation is defined."""
    order = torch.argsort(z, descending=True, stable=True)
    order = order[:k] if k > 0 else order
    probs = torch.softmax(z[order].double(), 0)
    before = probs.cumsum(0) - probs
    keep = (before < p) | (torch.arange(len(order)) == 0) if p < 1 else torch.ones(len(order), dtype=torch.bool)
    return order[keep & (probs >= min_p * probs[0])]


def run(logits: Tensor, t: float, seed: int, position: int, k: int = 0, p: float = 1.0, min_p: float = 0.0) -> int:
    token = kernels.sample(
        logits[None],
        torch.tensor([t]),
        torch.tensor([seed], dtype=torch.int64),
        torch.tensor([position], dtype=torch.int32),
        torch.tensor([k], dtype=torch.int32),
        torch.tensor([p]),
        torch.tensor([min_p]),
    )
    return int(token)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 1001)
    logits[1, 700] = logits[1, 400] = logits[1, 999] = 5
    logits[2, 1000] = 1
    assert kernels.sample(logits).tolist() == [0, 400, 1000]
    logits[0] = -torch.inf
    assert kernels.sample(logits[:1]).tolist() == [0]


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 300, 2000])
def test_draws_are_the_argmax_of_logits_and_the_shared_noise(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(vocab) * 2
    for seed, position in ((0, 0), (1, 7), (0x123456789ABCDEF, 2**20), (-5, 3)):
        score = (logits / 0.7).double() + noise(seed & (2**64 - 1), position, torch.arange(vocab))
        assert run(logits, 0.7, seed, position) == int(score.argmax())


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0, 60.0])
@pytest.mark.parametrize(
    ("k", "p", "min_p"),
    [
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.0, 0.0),
        (0, 1.0, 0.2),
        (50, 0.8, 0.05),
        (5000, 0.3, 0.0),
        (7, 0.999, 1.0),
    ],
)
def test_filters_keep_what_sorting_keeps(spread: float, k: int, p: float, min_p: float) -> None:
    torch.manual_seed(11)
    logits = torch.randn(3000) * spread
    kept = filtered(logits / 1.3, k, p, min_p)
    for position in range(12):
        score = (logits[kept] / 1.3).double() + noise(9, position, kept)
        best = score.max()
        winners = kept[score == best]
        assert run(logits, 1.3, 9, position, k, p, min_p) == int(winners.min())


def test_ties_at_the_edge_of_top_k_keep_the_lower_ids() -> None:
    logits = torch.zeros(500)
    drawn = {run(logits, 1.0, 3, position, k=4) for position in range(60)}
    assert drawn == {0, 1, 2, 3}


def test_tokens_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((300,), -torch.inf)
    logits[[5, 17, 250]] = torch.tensor([1.0, 2.0, 0.5])
    for kwargs in ({}, {"k": 10}, {"p": 0.99}, {"min_p": 0.01}):
        assert {run(logits, 1.0, 1, position, **kwargs) for position in range(50)} == {5, 17, 250}


def test_rows_are_independent_and_mix_greedy_with_drawn() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 777)
    temperature = torch.tensor([0, 1, 0.5, 0, 2, 1, 1, 0, 1], dtype=torch.float32)
    seeds, positions = torch.arange(9), torch.arange(9, dtype=torch.int32) * 3
    k = torch.tensor([0, 0, 5, 0, 3, 0, 9, 1, 0], dtype=torch.int32)
    p, min_p = torch.tensor([1, 0.5] * 4 + [1.0]), torch.tensor([0, 0, 0.1] * 3)
    together = kernels.sample(logits, temperature, seeds, positions, k, p, min_p)
    alone = [run(logits[r], float(temperature[r]), r, 3 * r, int(k[r]), float(p[r]), float(min_p[r])) for r in range(9)]
    assert together.tolist() == alone
    assert together[0] == logits[0].argmax()


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 4000
    tokens = kernels.sample(
        logits.expand(n, 4), torch.ones(n), torch.full((n,), 42), torch.arange(n, dtype=torch.int32)
    )
    share = torch.bincount(tokens.long(), minlength=4) / n
    assert torch.allclose(share, torch.softmax(logits, 0), atol=4 * (0.25 / n) ** 0.5)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="needs seeds and positions"):
        kernels.sample(torch.zeros(1, 4), torch.ones(1))
    with pytest.raises(ValueError, match="float32 rows"):
        kernels.sample(torch.zeros(1, 4).double())

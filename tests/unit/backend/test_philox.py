"""The shared random numbers against the published generator."""

from __future__ import annotations

import math

import pytest
import torch

from core.backend.philox import gumbel, philox, uniform

MASK = 0xFFFFFFFF


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & MASK, first >> 32 ^ c3 ^ k1, first & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
"""Counter, key and output of the known-answer vectors that Random123 publishes for philox4x32-10."""


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_plain_integers_give_the_published_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert philox4x32(counter, key) == words


def test_zero_vector_is_the_published_one() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(word) for word in philox(zero, zero, zero, 0)] == KNOWN[0][2]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822, 1234567890123])
@pytest.mark.parametrize(("position", "index", "stream"), [(0, 0, 0), (5, 151935, 1), (2**31 - 1, 2**31 - 1, 2)])
def test_words_equal_plain_integers(seed: int, position: int, index: int, stream: int) -> None:
    words = philox(torch.tensor(seed), torch.tensor(position), torch.tensor(index), stream)
    key = [seed & MASK, seed >> 32 & MASK]
    assert [int(word) for word in words] == philox4x32([position, index, stream, 0], key)


def test_arguments_broadcast() -> None:
    seeds, positions, ids = torch.arange(3)[:, None], torch.arange(3)[:, None] * 7, torch.arange(11)
    whole = uniform(seeds, positions, ids, 0)
    assert whole.shape == (3, 11)
    assert whole[2, 4] == uniform(torch.tensor(2), torch.tensor(14), torch.tensor(4), 0)


def test_uniform_is_exact_and_never_zero_or_one() -> None:
    u = uniform(torch.tensor(3), torch.tensor(1), torch.arange(200_000), 0)
    assert u.dtype == torch.float32
    assert u.min() > 0 and u.max() < 1
    doubled = u.double() * 2**24
    assert torch.equal(doubled, doubled.round()), "24 bits, so float32 holds every draw"
    assert abs(u.double().mean() - 0.5) < 4 * math.sqrt(1 / 12 / 200_000)


def test_gumbel_has_the_right_mean_and_variance() -> None:
    draws = gumbel(torch.tensor(9), torch.tensor(2), torch.arange(200_000), 0).double()
    assert draws.isfinite().all()
    assert abs(draws.mean() - 0.5772156649) < 0.02
    assert abs(draws.var() - math.pi**2 / 6) < 0.05


def test_streams_positions_and_seeds_are_apart() -> None:
    ids = torch.arange(4096)
    base = uniform(torch.tensor(1), torch.tensor(1), ids, 0)
    others = [
        uniform(torch.tensor(2), torch.tensor(1), ids, 0),
        uniform(torch.tensor(1 << 32), torch.tensor(1), ids, 0),
        uniform(torch.tensor(1), torch.tensor(2), ids, 0),
        uniform(torch.tensor(1), torch.tensor(1), ids, 1),
    ]
    for other in others:
        correlation = torch.corrcoef(torch.stack((base, other)))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(4096)

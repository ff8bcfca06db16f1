"""KVCacheManager: growth, windows, capacity and swapping, without a scheduler."""

from __future__ import annotations

import sys

import pytest
from simulation import full_layer, make_kv, sliding_layer

from core.errors import ConfigError
from core.kv import HostTier, KVCacheManager, KVTier
from core.request import EngineRequest, Request
from core.sampling_params import SamplingParams


def make_request(num_tokens: int, request_id: str = "r") -> Request:
    source = EngineRequest(
        request_id=request_id, prompt_token_ids=list(range(num_tokens)), sampling_params=SamplingParams()
    )
    return Request(source, 10_000)


def compute(kv: KVCacheManager, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
    new_ids = kv.allocate_slots(request, num_tokens)
    if new_ids is not None:
        request.num_computed_tokens += num_tokens
        kv.cache_blocks(request, request.num_computed_tokens)
        kv.check_integrity()
    return new_ids


def test_tables_grow_by_block_and_only_when_needed() -> None:
    kv, request = make_kv(block_size=4), make_request(20)
    assert compute(kv, request, 3) == ([1],)
    assert compute(kv, request, 1) == ([],)
    assert compute(kv, request, 6) == ([2, 3],)
    assert kv.block_ids(request) == ([1, 2, 3],)
    kv.free(request)
    assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks and kv.num_holders == 0


def test_a_refused_allocation_changes_nothing() -> None:
    kv, request = make_kv(block_size=4, num_blocks=4), make_request(40)
    assert kv.allocate_slots(request, 13) is None
    assert kv.num_holders == 0 and kv.pool.num_free_blocks == 3
    assert compute(kv, request, 8) == ([1, 2],)
    assert kv.allocate_slots(request, 5) is None
    assert kv.num_fitting_tokens(request) == 4
    kv.check_integrity()


def test_ids_are_unique_across_groups() -> None:
    kv, request = make_kv([full_layer(), sliding_layer(4), sliding_layer(8)], block_size=4), make_request(20)
    new_ids = compute(kv, request, 12)
    assert new_ids is not None and len({i for ids in new_ids for i in ids}) == 9


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 8, 9, 13])
def test_a_sliding_group_holds_no_more_than_its_window(window: int) -> None:
    kv, request = make_kv([full_layer(), sliding_layer(window)], block_size=4), make_request(100)
    for computed in range(0, 100, 2):
        compute(kv, request, 2)
        held = kv._held[request.request_id].tables[1]
        first_needed = max(0, computed + 2 - window + 1) // 4
        assert held.num_live <= -(-(window - 1) // 4) + 1
        assert all(block.block_id for block in held.blocks[first_needed:]), "what the next query sees is kept"
    full_ids, sliding_ids = kv.block_ids(request)
    assert 0 not in full_ids and sliding_ids[0] == 0
    kv.free(request)
    assert kv.usage == 0.0


@pytest.mark.parametrize(("layers", "expected"), [
    ([full_layer()], 40),
    ([full_layer(), full_layer()], 40),
    ([full_layer(), sliding_layer(5)], 32),
    ([sliding_layer(5)], sys.maxsize),
])  # fmt: skip
def test_capacity_is_what_one_request_can_have_computed(layers: list[object], expected: int) -> None:
    kv = make_kv(layers, block_size=4, num_blocks=11)  # type: ignore[arg-type]
    assert kv.capacity_tokens() == expected
    request = make_request(min(expected, 200))
    for _ in range(request.num_tokens):
        assert compute(kv, request, 1) is not None
    if expected < sys.maxsize:
        assert compute(kv, request, 1) is None


def test_capacity_in_one_step_counts_every_group_in_full() -> None:
    assert make_kv([full_layer(), sliding_layer(5)], block_size=4, num_blocks=11).capacity_tokens(whole=True) == 20


def test_swapped_blocks_come_back_in_order() -> None:
    kv, request = make_kv(block_size=4, num_host_blocks=4), make_request(20)
    compute(kv, request, 10)
    pairs_out = kv.swap_out(request)
    assert pairs_out is not None and [device for device, _ in pairs_out] == [1, 2, 3]
    assert kv.usage == 0.0
    other = make_request(4, "other")
    kv.allocate_slots(other, 4)
    pairs_in = kv.swap_in(request)
    assert pairs_in is not None and [host for host, _ in pairs_in] == [host for _, host in pairs_out]
    assert [device for _, device in pairs_in] == kv.block_ids(request)[0]
    kv.check_integrity()


def test_host_blocks_that_a_step_reads_are_not_given_out_in_that_step() -> None:
    """Copies out of a step come before copies in, so a block that is read must not be written in the same step."""
    kv, first, second = make_kv(block_size=4, num_host_blocks=1), make_request(4, "a"), make_request(4, "b")
    compute(kv, first, 4)
    compute(kv, second, 4)
    assert kv.swap_out(first) is not None
    assert kv.swap_in(first) is not None
    assert kv.swap_out(second) is None
    kv.begin_step()
    assert kv.swap_out(second) is not None
    kv.check_integrity()


def test_nothing_is_swapped_without_room_or_content() -> None:
    kv, request = make_kv(block_size=4, num_host_blocks=1), make_request(20)
    kv.allocate_slots(request, 8)
    assert kv.swap_out(request) is None, "nothing was computed"
    request.num_computed_tokens = 8
    assert kv.swap_out(request) is None, "no room"
    kv.check_integrity()
    assert make_kv().swap_out(request) is None, "no tier"


def test_a_swapped_request_that_ends_gives_its_host_blocks_back() -> None:
    kv, request = make_kv(block_size=4, num_host_blocks=4), make_request(20)
    compute(kv, request, 10)
    kv.swap_out(request)
    kv.free(request)
    kv.begin_step()
    assert kv.swap_tier is not None and kv.swap_tier.num_free_blocks == 4


def test_the_host_tier_is_a_tier_and_keeps_books() -> None:
    tier = HostTier(3)
    assert isinstance(tier, KVTier)
    taken = tier.allocate(2)
    assert taken == [0, 1] and tier.allocate(2) is None
    tier.free(taken)
    tier.check_integrity()
    with pytest.raises(AssertionError, match="freed twice"):
        tier.free([0])
    with pytest.raises(ConfigError, match="-1"):
        HostTier(-1)


def test_reset_also_hides_what_is_swapped_out() -> None:
    kv, request = make_kv(block_size=4, num_host_blocks=4), make_request(20)
    compute(kv, request, 8)
    kv.swap_out(request)
    kv.reset_prefix_cache()
    kv.swap_in(request)
    compute(kv, request, 8)
    assert kv.get_computed_blocks(make_request(20, "other")).num_tokens == 0
    kv.check_integrity()

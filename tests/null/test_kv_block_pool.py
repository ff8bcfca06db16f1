"""BlockPool: free list in eviction order, reference counts, contents that can be found again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import ConfigError
from core.kv import NULL_BLOCK_ID, Block, BlockPool


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert ids(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_free_blocks == 0 and pool.null_block.block_id == NULL_BLOCK_ID


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        BlockPool(1)


def test_cached_blocks_are_evicted_last_and_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    for index in (0, 1, 2):
        pool.register(blocks[index], bytes([index]), 0)
    pool.free([blocks[1], blocks[3], blocks[0], blocks[4], blocks[2]])
    assert set(ids(pool.allocate(2))) == {4, 5}, "blocks without findable content go first"
    assert ids(pool.allocate(3)) == [2, 1, 3]


def test_a_found_block_leaves_the_free_list_and_keeps_its_content() -> None:
    pool = BlockPool(3)
    block = pool.allocate(1)[0]
    pool.register(block, b"x", 0)
    pool.free([block])
    found = pool.find(b"x", 0)
    assert found is block and block.ref_count == 0
    pool.touch([block])
    assert pool.num_free_blocks == 1 and pool.find(b"x", 0) is block
    pool.check_integrity()


def test_an_evicted_block_is_not_found_any_more() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1)[0]
    pool.register(block, b"x", 0)
    pool.free([block])
    pool.allocate(1)
    assert pool.find(b"x", 0) is None
    pool.check_integrity()


def test_a_second_block_of_equal_content_does_not_replace_the_first() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, b"x", 0)
    pool.register(second, b"x", 0)
    pool.free([second])
    assert pool.find(b"x", 0) is first
    pool.check_integrity()


def test_the_same_hash_in_two_groups_names_two_blocks() -> None:
    pool = BlockPool(3, num_groups=2)
    first, second = pool.allocate(2)
    pool.register(first, b"x", 0)
    assert pool.find(b"x", 1) is None
    pool.register(second, b"x", 1)
    assert pool.find(b"x", 0) is first and pool.find(b"x", 1) is second


def test_a_double_free_is_noticed() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_forgetting_all_keeps_references() -> None:
    pool = BlockPool(3)
    held, free = pool.allocate(2)
    pool.register(held, b"x", 0)
    pool.register(free, b"y", 0)
    pool.free([free])
    pool.forget_all()
    assert pool.find(b"x", 0) is None and pool.find(b"y", 0) is None
    assert held.ref_count == 1 and pool.num_free_blocks == 1
    pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model: a list of references and a map of contents."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, num_groups=2)
        self.held: list[Block] = []
        self.contents: dict[tuple[bytes, int], Block] = {}
        self.num_hashes = 0

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free_blocks:
            taken = self.pool.allocate(count)
            assert not set(taken) & set(self.held)
            self.contents = {key: block for key, block in self.contents.items() if block not in taken}
            self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        chosen = data.draw(st.lists(st.sampled_from(range(len(self.held))), unique=True))
        self.pool.free([self.held[index] for index in chosen])
        self.held = [block for index, block in enumerate(self.held) if index not in chosen]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), group=st.integers(0, 1), reuse=st.booleans())
    def register(self, data: Any, group: int, reuse: bool) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.num_hashes += not reuse
        key = str(self.num_hashes).encode()
        if block not in self.contents.values() and (key, group) not in self.contents:
            self.contents[key, group] = block
        self.pool.register(block, key, group)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def hit(self, data: Any) -> None:
        key, group = data.draw(st.sampled_from(sorted(self.contents)))
        block = self.pool.find(key, group)
        assert block is self.contents[key, group]
        self.pool.touch([block])
        self.held.append(block)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.contents.clear()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free_blocks == 7 - len(set(self.held))
        assert all(block.ref_count == self.held.count(block) for block in self.held)
        assert all(self.pool.find(*key) is block for key, block in self.contents.items())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""Names of contents: equal only where everything that a block depends on is equal."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st
from simulation import Simulation, full_layer, make_kv, sliding_layer

from core.kv.prefix_cache import BlockHasher, hash_block, hash_root
from core.request import EngineRequest, Request
from core.sampling_params import SamplingParams

labels = st.none() | st.text(max_size=4)


@given(labels, labels, labels, labels)
def test_roots_are_equal_only_for_equal_adapter_and_salt(
    a: str | None, b: str | None, c: str | None, d: str | None
) -> None:
    assert (hash_root(a, b) == hash_root(c, d)) == ((a, b) == (c, d))


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=2), st.lists(st.integers(0, 3), max_size=3),
       st.lists(st.binary(min_size=32, max_size=32), max_size=2), st.lists(st.integers(0, 3), max_size=3))  # fmt: skip
def test_hashes_are_equal_only_for_equal_tokens_and_images(
    images: list[bytes], tokens: list[int], other_images: list[bytes], other_tokens: list[int]
) -> None:
    equal = (images, tokens) == (other_images, other_tokens)
    root = hash_root(None, None)
    assert (hash_block(root, tokens, images) == hash_block(root, other_tokens, other_images)) == equal


def test_the_hash_depends_on_the_parent() -> None:
    assert hash_block(hash_root(None, None), [1, 2]) != hash_block(hash_root(None, "s"), [1, 2])


def test_the_hash_is_the_same_on_every_machine() -> None:
    """Hashes name blocks in remote stores, so a change here must be a decision."""

    def part(tag: str, payload: bytes) -> bytes:
        return tag.encode() + len(payload).to_bytes(8, "little") + payload

    root = hashlib.sha256(part("R", b"") + part("A", b"name") + part("S", b"salt")).digest()
    tokens = b"".join(token_id.to_bytes(8, "little") for token_id in (1, 2, 300000))
    digest = hashlib.sha256(part("P", root) + part("T", tokens)).digest()
    assert hash_block(hash_root("name", "salt"), [1, 2, 300000]) == digest


def make_request(tokens: list[int]) -> Request:
    source = EngineRequest(request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams())
    return Request(source, 1000)


def test_blocks_are_hashed_once_and_only_when_asked_for() -> None:
    hasher, request = BlockHasher(4), make_request(list(range(20)))
    third = hasher.get(request, 2)
    assert len(request.block_hashes) == 3
    assert hasher.get(request, 2) is third and hasher.get(request, 0) is request.block_hashes[0]


def test_a_cold_prompt_costs_one_hash_to_look_up() -> None:
    kv, request = make_kv(), make_request(list(range(20)))
    assert kv.get_computed_blocks(request).num_tokens == 0
    assert len(request.block_hashes) == 1


def test_without_prefix_caching_nothing_is_hashed() -> None:
    simulation = Simulation(make_kv(prefix_caching=False))
    simulation.add("a", range(20), max_tokens=3)
    request = simulation.scheduler._registry.requests["a"]
    simulation.run()
    assert request.block_hashes == []


def cached_tokens(simulation: Simulation, request_id: str, prompt: list[int], **key: str) -> int:
    record = simulation.add(request_id, prompt, max_tokens=4, **key)
    simulation.run()
    counts = [output.num_cached_tokens for output in record.outputs]
    assert not any(counts[1:]), "reported once"
    return counts[0]


def test_adapter_and_salt_of_equal_name_share_nothing() -> None:
    """H039: five steps over one prompt; only the repeat of the same salt may hit, and the last token is recomputed."""
    simulation, prompt = Simulation(make_kv(block_size=16, num_blocks=40)), list(range(64))
    steps = [{"adapter": "S"}, {"salt": "S"}, {"salt": "S"}, {"salt": "T"}, {}]
    counts = [cached_tokens(simulation, f"r{i}", prompt, **key) for i, key in enumerate(steps)]
    assert counts == [0, 0, 48, 0, 0]
    simulation.check_reference()
    stats = simulation.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (5 * 64, 48)


def test_a_full_hit_still_computes_the_last_token() -> None:
    simulation, prompt = Simulation(make_kv(block_size=4)), list(range(16))
    assert cached_tokens(simulation, "a", prompt) == 0
    assert cached_tokens(simulation, "b", prompt) == 12
    assert cached_tokens(simulation, "c", [*prompt, 1]) == 16
    simulation.check_reference()


def test_output_tokens_are_found_again_by_the_next_turn() -> None:
    simulation = Simulation(make_kv(block_size=4))
    record = simulation.add("a", range(10), max_tokens=9)
    simulation.run()
    assert cached_tokens(simulation, "b", [*range(10), *record.tokens, 1, 2]) == 16


def test_prompt_logprobs_bypass_the_cache() -> None:
    """H040: a request for prompt_logprobs computes every position, and its entries are complete each time."""
    simulation, prompt = Simulation(make_kv(block_size=16, num_blocks=40), max_num_batched_tokens=8), list(range(33))
    records = [
        simulation.add(f"r{i}", prompt, max_tokens=1, prompt_logprobs=1) for i in range(3) if not simulation.run()
    ]
    simulation.run()
    entries = [record.outputs[0].prompt_logprobs for record in records]
    assert entries[0] == entries[1] == entries[2]
    assert entries[0] is not None and len(entries[0]) == 33 and entries[0][0] is None and all(entries[0][1:])
    assert all(record.outputs[0].num_cached_tokens == 0 for record in records)


def test_a_sliding_group_needs_only_the_tail_before_the_hit() -> None:
    """Of a prefix of ten blocks all but the last two are gone, and a window of six tokens sees no more than those."""
    kv = make_kv([sliding_layer(6)], block_size=4, num_blocks=65)
    simulation, prompt = Simulation(kv), list(range(41))
    assert cached_tokens(simulation, "a", prompt) == 0
    tail = {BlockHasher(4).get(make_request(prompt), index) for index in (8, 9)}
    for block in kv.pool.blocks:
        if block.block_hash is not None and block.block_hash not in tail:
            kv.pool._forget(block)
    assert cached_tokens(simulation, "b", prompt) == 40
    simulation.check_reference()


def test_a_hit_is_as_long_as_the_weakest_group_allows() -> None:
    kv = make_kv([full_layer(), sliding_layer(6)], block_size=4, num_blocks=65)
    simulation, prompt = Simulation(kv), list(range(41))
    cached_tokens(simulation, "a", prompt)
    hashes = [BlockHasher(4).get(make_request(prompt), index) for index in range(10)]
    gone = kv.pool.find(hashes[8], 1)
    assert gone is not None
    kv.pool._forget(gone)
    kv.pool.check_integrity()
    assert kv.get_computed_blocks(make_request(prompt)).num_tokens == 32
    lost = kv.pool.find(hashes[3], 0)
    assert lost is not None
    kv.pool._forget(lost)
    assert kv.get_computed_blocks(make_request(prompt)).num_tokens == 12


def test_a_prompt_repeated_under_asynchronous_scheduling_hits_in_every_group() -> None:
    """The tail of the prompt must be named before it leaves the window, also when results come late."""
    for depth in (0, 1, 2):
        simulation = Simulation(make_kv([full_layer(), sliding_layer(6)], block_size=4), depth=depth)
        prompt = list(range(43))
        assert cached_tokens(simulation, "a", prompt) == 0
        assert cached_tokens(simulation, "b", prompt) == 40, depth


def test_reset_hides_what_running_requests_have_computed_and_will_compute() -> None:
    simulation, prompt = Simulation(make_kv([sliding_layer(6)], block_size=4)), list(range(20))
    simulation.add("a", prompt, max_tokens=20)
    for _ in range(4):
        simulation.step()
    assert simulation.scheduler.reset_prefix_cache()
    simulation.run()
    output = simulation.records["a"].tokens
    assert cached_tokens(simulation, "b", prompt + output) == 0
    assert cached_tokens(simulation, "c", prompt + output) > 0

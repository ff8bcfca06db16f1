"""Flat arguments become a configuration."""

from __future__ import annotations

import pytest

from core.engine.args import engine_config
from core.errors import ConfigError


def test_arguments_land_in_their_sections() -> None:
    config = engine_config("m", dtype="float32", max_num_seqs=3, block_size=32, max_model_len=128)
    assert (config.model, config.dtype, config.max_model_len) == ("m", "float32", 128)
    assert (config.scheduler.max_num_seqs, config.cache.block_size) == (3, 32)


@pytest.mark.parametrize(
    ("name", "value", "section", "field"),
    [
        ("gpu_memory_utilization", 0.5, "cache", "device_memory_utilization"),
        ("num_kv_blocks", 7, "cache", "num_blocks"),
        ("swap_space", 1024, "cache", "swap_space_bytes"),
    ],
)
def test_names_that_users_know_are_taken(name: str, value: float, section: str, field: str) -> None:
    config = engine_config("m", **{name: value})
    assert getattr(getattr(config, section), field) == value


def test_an_unknown_argument_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"'max_num_seq'.*'max_num_seqs'"):
        engine_config("m", max_num_seq=3)


def test_a_value_of_the_wrong_type_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engine_config("m", max_num_seqs="many")


def test_a_value_out_of_range_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        engine_config("m", max_num_seqs=0)


@pytest.mark.parametrize(
    ("name", "flag", "values"),
    [
        ("max_num_seqs", "--max-num-seqs", (0, -5, 2**31, 10**20)),
        ("max_num_batched_tokens", "--max-num-batched-tokens", (0, 10**20)),
        ("max_num_queued_reqs", "--max-num-queued-reqs", (-5, 10**20)),
        ("long_prefill_token_threshold", "--long-prefill-token-threshold", (-5, 10**20)),
        ("max_model_len", "--max-model-len", (0, -2, 10**20)),
        ("max_logprobs", "--max-logprobs", (-5, 10**20)),
        ("seed", "--seed", (10**20, -(10**20))),
        ("threads", "--threads", (-5, 2**31)),
        ("block_size", "--block-size", (0, -5, 10**20)),
        ("num_kv_blocks", "--num-kv-blocks", (1, -5, 10**20)),
        ("kv_cache_memory_bytes", "--kv-cache-memory-bytes", (0, -5, 10**20)),
        ("swap_space", "--swap-space", (-5, 10**20)),
    ],
)
def test_a_number_that_no_engine_can_take_is_refused_before_one_is_started(
    name: str, flag: str, values: tuple[int, ...]
) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"{flag} must be at (least|most) .*, got {value}"):
            engine_config("m", **{name: value})


def test_swapping_needs_a_place_to_swap_to() -> None:
    with pytest.raises(ConfigError, match="--swap-space is 0"):
        engine_config("m", preemption_mode="swap")
    assert engine_config("m", preemption_mode="swap", swap_space=4096).scheduler.preemption_mode == "swap"

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

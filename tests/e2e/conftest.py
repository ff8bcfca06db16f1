"""Models and servers of the end-to-end tests; one server of the tiny model serves most of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from core_process import CoreServer, default_device, served
from tiny import make_tiny

POOL_TOKENS = 1536
"""Tokens that the KV pool of the shared server holds: a handful of its longest requests."""
MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def pool_flags() -> tuple[str, ...]:
    """Flags of a KV pool for `POOL_TOKENS` tokens; one more block is reserved."""
    block_size = 128 if default_device() == "sim" else 16
    return ("--block-size", str(block_size), "--num-kv-blocks", str(POOL_TOKENS // block_size + 1))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a context of 512 tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return make_tiny("LlamaForCausalLM", folder, max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def tiny_server(tiny_llama: Path, pool_flags: tuple[str, ...]) -> Iterator[CoreServer]:
    """The tiny model in float32 with a KV pool for a few requests."""
    with served(tiny_llama, "--dtype", "float32", "--threads", "1", *pool_flags) as server:
        yield server

"""The name of a block's content: a hash over everything that the content depends on.

A block's hash covers its tokens and the hash of the block before it; the first block follows a root that covers
adapter and cache salt. Each part is written as tag, length, payload, so that no two lists of parts have the same
bytes: an adapter called "S" and a salt "S" differ, and so do no salt and an empty one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from core.request import Request

__all__ = ["BlockHasher", "hash_block", "hash_root"]

_ROOT, _PARENT, _TOKENS, _ADAPTER, _SALT, _MULTIMODAL = b"R", b"P", b"T", b"A", b"S", b"M"
_LENGTH = struct.Struct("<Q")


def _part(tag: bytes, payload: bytes) -> bytes:
    return tag + _LENGTH.pack(len(payload)) + payload


def hash_root(adapter: str | None, cache_salt: str | None) -> bytes:
    """The parent of a request's first block: 32 bytes."""
    parts = _part(_ROOT, b"")
    if adapter is not None:
        parts += _part(_ADAPTER, adapter.encode("utf-8", "surrogatepass"))
    if cache_salt is not None:
        parts += _part(_SALT, cache_salt.encode("utf-8", "surrogatepass"))
    return hashlib.sha256(parts).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], multimodal_hashes: Sequence[bytes] = ()) -> bytes:
    """The name of a full block: 32 bytes, the same on every machine.

    Args:
        parent: Hash of the block before, or `hash_root(...)`.
        token_ids: Tokens of the block.
        multimodal_hashes: Content hashes of images and the like whose placeholders the block holds.
    """
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    parts = _part(_PARENT, parent) + _part(_TOKENS, tokens)
    for item in multimodal_hashes:
        parts += _part(_MULTIMODAL, item)
    return hashlib.sha256(parts).digest()


class BlockHasher:
    """Hashes a request's blocks when they are asked for, each once; results stay in `request.block_hashes`.

    Args:
        block_size: Tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def get(self, request: Request, index: int) -> bytes:
        """Hash of block `index`, all of whose tokens must be known."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            tokens = request.all_token_ids[start : start + self.block_size]
            assert len(tokens) == self.block_size, f"block {len(hashes)} of {request} is not full"
            parent = hashes[-1] if hashes else hash_root(request.adapter, request.cache_salt)
            hashes.append(hash_block(parent, tokens))
        return hashes[index]

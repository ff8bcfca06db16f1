"""The KV cache's books, without torch: blocks, tables, prefix cache, groups and tiers."""

from __future__ import annotations

from core.kv.block_pool import NULL_BLOCK_ID, Block, BlockPool
from core.kv.block_table import BlockTable
from core.kv.groups import KVCacheGroup, KVCacheGroups
from core.kv.kv_cache_manager import KVCacheManager, PrefixHit
from core.kv.tiers import HostTier, KVTier

__all__ = [
    "NULL_BLOCK_ID",
    "Block",
    "BlockPool",
    "BlockTable",
    "HostTier",
    "KVCacheGroup",
    "KVCacheGroups",
    "KVCacheManager",
    "KVTier",
    "PrefixHit",
]

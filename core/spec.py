"""Values that describe hardware and models without torch: safe to import for discovery, before any SDK."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "CONTRACT_VERSION",
    "BackendInfo",
    "CacheKind",
    "Capabilities",
    "ConformanceCase",
    "DType",
    "DeviceInfo",
    "KVCacheSpec",
    "ModelEntry",
    "ModelSpec",
]

CONTRACT_VERSION = (1, 0)
"""(major, minor) of the backend contract that this core speaks. Minors only add."""


class DType(enum.StrEnum):
    """Element types, spelled as torch spells them."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"
    INT64 = "int64"
    INT32 = "int32"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E4M3FNUZ: 1,
    DType.FLOAT8_E5M2: 1,
    DType.FLOAT8_E8M0FNU: 1,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """What an installed package says of a backend before any of its heavy code is imported.

    Args:
        name: The word after `--device`, lower case.
        vendor: Who makes the hardware, for people.
        api: (major, min_minor, built_minor) of the contract: it needs at least `min_minor` of the core and was
            built against `built_minor`.
        load: "module:attribute" of the Backend subclass; imported only when asked for.
        env: Environment that must be set before the worker process is spawned; SDKs read switches at start.
        priority: With `--device auto`, the usable backend of the highest priority wins.
        remedy: What to install or check where `probe()` finds no device, for people.
    """

    name: str
    vendor: str
    api: tuple[int, int, int]
    load: str
    env: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    remedy: str = ""

    def version_conflict(self) -> str:
        """Why this core cannot drive the plugin, naming both versions and the remedy; empty where it can."""
        major, min_minor, built_minor = self.api
        have = ".".join(map(str, CONTRACT_VERSION))
        if major != CONTRACT_VERSION[0]:
            return (
                f"backend {self.name!r} speaks contract {major}.{built_minor}, this core {have}; "
                f"install a release of the backend for contract {CONTRACT_VERSION[0]}.x, or of core-inference for "
                f"{major}.x"
            )
        if min_minor > CONTRACT_VERSION[1]:
            return (
                f"backend {self.name!r} needs contract {major}.{min_minor} or newer, this core has {have}; "
                "upgrade core-inference"
            )
        return ""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device as `probe()` saw it, without creating a context.

    Args:
        index: Position among the devices of the backend.
        arch: Architecture in the vendor's own word ("acme-1").
        memory_bytes: Total memory in bytes; 0 where unknown.
        sdk: Version of driver or SDK, for people.
        name: Product name, for people.
        simulated: Whether it only stands in for a device: what is shown on it counts as SIMULATED, never as VALIDATED.
    """

    index: int
    arch: str
    memory_bytes: int
    sdk: str
    name: str = ""
    simulated: bool = False


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What belongs to the device alone; operations are asked one by one through `Backend.supports`.

    Args:
        block_sizes: KV block sizes (tokens) that the device can take, the preferred one first.
        unified_memory: Whether host and device share one memory.
        pinned_memory: Whether page-locked host buffers make copies asynchronous.
        alignment: Bytes to which planes of a KV block must be aligned.
        transfer_kinds: Memory kinds that a transfer engine can address ("host", "device").
        swap: Whether `copy_blocks` can move blocks between device and host.
        num_threads: Host threads that the backend uses for compute; 0 for a device of its own.
    """

    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    unified_memory: bool = False
    pinned_memory: bool = False
    alignment: int = 64
    transfer_kinds: tuple[str, ...] = ("host",)
    swap: bool = True
    num_threads: int = 0


class CacheKind(enum.StrEnum):
    """Families of cache. A group holds layers of one kind."""

    FULL = "full"
    SLIDING = "sliding"
    MLA = "mla"
    INDEX = "index"
    STATE = "state"


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one layer wants to keep of each token (or of each request, for STATE).

    Layers of equal spec share a group and its block table.

    Args:
        kind: Family.
        num_kv_heads: Heads of key and value on this rank.
        head_dim: Dimension of a key head.
        v_head_dim: Dimension of a value head; 0 where keys and values are one (MLA).
        dtype: Element type of the cache.
        window: Tokens that a query may see, itself included; 0 means all.
        num_spec_tokens: Draft tokens a step may hold; sizes the slots of STATE caches.
        state_shapes: Shapes of the tensors of one STATE slot.
    """

    kind: CacheKind
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: DType
    window: int = 0
    num_spec_tokens: int = 0
    state_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in the canonical layout, scales not counted."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model's shape as scheduler, cache and doctor need it; the model's file makes it from its config.

    Args:
        architecture: Name as in `config.json` ("LlamaForCausalLM").
        dtype: Type of activations.
        hidden_size: Width of the residual stream.
        vocab_size: Real token ids, [0, vocab_size): what a sampler may draw. Padding rows of the head are above it.
        max_model_len: Longest sequence that the positions allow.
        layers: Cache wishes, layer by layer; None for a layer without a cache.
        num_parameters: Elements of all weights.
    """

    architecture: str
    dtype: DType
    hidden_size: int
    vocab_size: int
    max_model_len: int
    layers: tuple[KVCacheSpec | None, ...]
    num_parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class ConformanceCase:
    """One further check that a package brings for one of its backends; the suite runs it beside its own.

    Args:
        id: Stable name that begins with the backend's: "acme/interrupt-storm".
        load: "module:function"; the function takes an opened `core.backend.Backend`, its to use and not to close, and
            raises where something is wrong.
    """

    id: str
    load: str


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One architecture that a package brings.

    Args:
        architecture: Name as in `config.json`.
        load: "module:attribute" of the model class.
    """

    architecture: str
    load: str

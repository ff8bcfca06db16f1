"""The backend contract. A vendor imports `core.spec` (light, for discovery) and this package, nothing else."""

from __future__ import annotations

from core.backend.base import (
    Arena,
    Backend,
    Capture,
    Graph,
    Kind,
    Lens,
    Limits,
    MemoryInfo,
    OpenConfig,
    Pending,
    Verdict,
)
from core.backend.batch import Batch, GroupBatch, GroupSpec, Plan
from core.backend.comm import CommLimits, Communicator, SingleRank, TorchCommunicator
from core.backend.layout import KVLayout, KVSlab, Plane, Region, canonical_layout, torch_dtype
from core.backend.weights import SCHEMES, Packed, Quantized, Role, Scheme, WeightSource, register_scheme
from core.errors import BackendUnavailableError, UnsupportedError

__all__ = [
    "SCHEMES",
    "Arena",
    "Backend",
    "BackendUnavailableError",
    "Batch",
    "Capture",
    "CommLimits",
    "Communicator",
    "Graph",
    "GroupBatch",
    "GroupSpec",
    "KVLayout",
    "KVSlab",
    "Kind",
    "Lens",
    "Limits",
    "MemoryInfo",
    "OpenConfig",
    "Packed",
    "Pending",
    "Plan",
    "Plane",
    "Quantized",
    "Region",
    "Role",
    "Scheme",
    "SingleRank",
    "TorchCommunicator",
    "UnsupportedError",
    "Verdict",
    "WeightSource",
    "canonical_layout",
    "register_scheme",
    "torch_dtype",
]

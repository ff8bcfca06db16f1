"""Simulated devices: an environment variable names chips that are not here, and their kernels run interpreted.

Imports neither torch nor Triton: plugins ask it while backends are listed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from core.spec import DeviceInfo
from core_triton.target import TARGETS

__all__ = [
    "INTERPRETER_ENV",
    "SIMULATED_MEMORY_BYTES",
    "VARIABLES",
    "archs",
    "devices",
    "environment",
    "refusal",
    "wished",
]

Family = Literal["cuda", "hip"]

VARIABLES: Mapping[str, str] = {"cuda": "CORE_CUDA_SIMULATE", "hip": "CORE_ROCM_SIMULATE"}
"""By family: the variable that lists simulated chips, as in `CORE_CUDA_SIMULATE=sm_90` or `=sm_90,sm_80`."""
INTERPRETER_ENV: Mapping[str, str] = {"TRITON_INTERPRET": "1"}
"""What a process must have before the first kernel is decorated, for kernels to run in the interpreter."""
SIMULATED_MEMORY_BYTES = 2**30
"""Memory of a simulated device: enough for tiny models, and small enough to be held on the host."""


def archs(family: Family) -> list[str]:
    """The chips of that family that the kernels are built for, oldest first."""
    return [target.arch for target in TARGETS.values() if target.family == family]


def wished(family: Family) -> list[str]:
    """The chips that the variable names; empty where it is not set."""
    return [word.strip() for word in os.environ.get(VARIABLES[family], "").split(",") if word.strip()]


def refusal(family: Family) -> str:
    """What is wrong with the variable, and what to do; empty where nothing is."""
    unknown = [arch for arch in wished(family) if arch not in archs(family)]
    if not unknown:
        return ""
    return f"{VARIABLES[family]} names {', '.join(unknown)}, which is no chip; give one of {', '.join(archs(family))}"


def environment(family: Family) -> dict[str, str]:
    """What the device's process must start with: the interpreter where chips are simulated, nothing else."""
    return dict(INTERPRETER_ENV) if wished(family) and not refusal(family) else {}


def devices(family: Family) -> list[DeviceInfo]:
    """The simulated devices; empty where none are asked for, or the variable is wrong."""
    if refusal(family):
        return []
    return [
        DeviceInfo(
            index=index,
            arch=arch,
            memory_bytes=SIMULATED_MEMORY_BYTES,
            sdk="Triton interpreter",
            name=f"simulated {arch}",
            simulated=True,
        )
        for index, arch in enumerate(wished(family))
    ]

"""One of two ranks, which runs what both check.

`python -m core_conformance.operations.collective_rank INFO RANK MEETING_FILE`.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.backend import Backend, CommLimits, OpenConfig
from core.backend.ops import OpSpec
from core.errors import UnsupportedError
from core.spec import BackendInfo
from core_conformance.operations.rank_cases import CASES, WORLD
from core_conformance.subject import Subject
from core_conformance.target import Target

__all__ = ["RESULT", "info_json", "main"]

RESULT = "result:"
"""What the line of standard output begins with that holds the answers."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)


def info_json(info: BackendInfo) -> str:
    """What a rank must know of a backend."""
    return json.dumps({"name": info.name, "vendor": info.vendor, "api": info.api, "load": info.load})


def _target(text: str) -> Target:
    fields = json.loads(text)
    info = BackendInfo(**(fields | {"api": tuple(fields["api"])}))
    module, _, attribute = info.load.partition(":")
    make = getattr(importlib.import_module(module), attribute)
    return Target(info=info, make=make)


def _transport(backend: Backend, num_devices: int) -> str:
    """The one that torch has for the device; gloo, through the host, where it has none or the ranks share a device."""
    try:
        own = str(dist.get_default_backend_for_device(backend.device))
    except ValueError:
        return "gloo"
    return own if num_devices >= WORLD else "gloo"


class _Later(Subject):
    """Compares when a case is through: a rank that ends it half way would leave the other one waiting."""

    def __init__(self, target: Target, backend: Backend) -> None:
        super().__init__(target, backend)
        self._comparisons: list[Callable[[], None]] = []

    def agree(self, op: OpSpec | str, got: Tensor, *args: Any, **kwargs: Any) -> None:
        self._comparisons.append(partial(super().agree, op, got.clone(), *args, **kwargs))

    def equal(self, op: OpSpec | str, got: Tensor, *args: Any, **kwargs: Any) -> None:
        self._comparisons.append(partial(super().equal, op, got.clone(), *args, **kwargs))

    def compare(self) -> None:
        """Everything that was noted."""
        for comparison in self._comparisons:
            comparison()


def main(info: str, rank: int, meeting_file: str) -> None:
    """Joins the other rank, runs every case, and writes a JSON object to standard output.

    The object has a text for each case: empty where it is right, what is wrong, or "unsupported: " and the reason.
    """
    target = _target(info)
    backend: Backend = target.make()
    target.index = min(rank, len(backend.probe()) - 1)
    backend.open(target.index, OpenConfig(rank=rank, world=WORLD))
    dist.init_process_group(
        backend=_transport(backend, len(backend.probe())),
        init_method=f"file://{meeting_file}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    answers = {}
    try:
        comm = backend.comm(list(range(WORLD)), "tp", CommLimits(max_bytes=1 << 16, dtypes=_DTYPES))
    except UnsupportedError as error:
        answers = dict.fromkeys(CASES, f"unsupported: {error}")
    else:
        for name, case in CASES.items():
            try:
                subject = _Later(target, backend)
                case(subject, comm)
                subject.compare()
                answers[name] = ""
            except UnsupportedError as error:
                answers[name] = f"unsupported: {error}"
            except AssertionError as error:
                answers[name] = f"{error}"
        comm.close()
    sys.stdout.write(f"{RESULT}{json.dumps(answers)}\n")
    sys.stdout.flush()
    backend.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

"""One of two ranks that check collectives: `python -m core_conformance.collective_rank LOAD RANK MEETING_FILE`."""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from core.backend import Backend, CommLimits, Communicator, OpenConfig
from core.errors import UnsupportedError

__all__ = ["main"]

_WORLD = 2


def _wrong(backend: Backend, comm: Communicator, rank: int) -> Iterator[str]:
    """Names of the collectives that gave a wrong answer."""

    def put(x: Tensor) -> Tensor:
        return x.clone().to(backend.device)

    mine = torch.arange(6.0).view(3, 2) + 10 * rank
    everyone = [torch.arange(6.0).view(3, 2) + 10 * other for other in range(_WORLD)]
    for dtype in (torch.float32, torch.bfloat16):
        if not torch.equal(comm.all_reduce_(put(mine.to(dtype))).cpu(), sum(everyone).to(dtype)):  # type: ignore[union-attr]
            yield f"all_reduce_ in {dtype}"
    for dtype in (torch.float32, torch.float8_e4m3fn):
        gathered = comm.all_gather(put(mine.to(dtype))).cpu()
        if not torch.equal(gathered.float(), torch.cat(everyone).to(dtype).float()):
            yield f"all_gather in {dtype}"
    wide = torch.arange(8.0).view(4, 2) + 10 * rank
    total = sum(torch.arange(8.0).view(4, 2) + 10 * other for other in range(_WORLD))
    assert isinstance(total, Tensor)
    if not torch.equal(comm.reduce_scatter(put(wide)).cpu(), total[2 * rank : 2 * rank + 2]):
        yield "reduce_scatter"
    yield from _exchange(backend, comm, rank)
    root = put(torch.full((3,), 7.0) if rank == 1 else torch.zeros(3))
    if not torch.equal(comm.broadcast(root, 1).cpu(), torch.full((3,), 7.0)):
        yield "broadcast"


def _exchange(backend: Backend, comm: Communicator, rank: int) -> Iterator[str]:
    rows = [[1, 2], [0, 3]]
    sent = torch.arange(sum(rows[rank]), dtype=torch.float32)[:, None] + 100 * rank
    back = comm.all_to_all_v(sent.to(backend.device), rows[rank], [rows[other][rank] for other in range(_WORLD)]).cpu()
    expected = [[0.0], [1.0, 2.0, 100.0, 101.0, 102.0]][rank]
    if back.flatten().tolist() != expected:
        yield "all_to_all_v"
    message = torch.full((4,), 3.0, device=backend.device)
    if rank == 0:
        comm.send(message, 1)
    elif comm.recv(torch.zeros_like(message), 0).tolist() != [3.0] * 4:
        yield "send and recv"


def main(load: str, rank: int, meeting_file: str) -> None:
    """Joins the other rank, checks every collective, and writes `result:` with a JSON object to standard output."""
    module, _, attribute = load.partition(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)()
    backend.open(min(rank, len(backend.probe()) - 1), OpenConfig(rank=rank, world=_WORLD))
    dist.init_process_group(
        init_method=f"file://{meeting_file}", rank=rank, world_size=_WORLD, timeout=datetime.timedelta(seconds=60)
    )
    result: dict[str, object] = {"unsupported": "", "wrong": []}
    try:
        comm = backend.comm([0, 1], "tp", CommLimits(max_bytes=1 << 16, dtypes=(torch.float32, torch.bfloat16)))
        result["wrong"] = list(_wrong(backend, comm, rank))
        comm.close()
    except UnsupportedError as error:
        result["unsupported"] = str(error)
    sys.stdout.write(f"result:{json.dumps(result)}\n")
    sys.stdout.flush()
    backend.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

"""L1: collectives, of one rank in this process and of two ranks in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from core.backend import CommLimits
from core_conformance.checks import check
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Subject
from core_conformance.target import Target

_LIMITS = CommLimits(max_bytes=1 << 16, dtypes=(torch.float32, torch.bfloat16))


@check("L1/collectives/single")
def test_one_rank_is_the_identity(subject: Subject) -> None:
    """Every collective over a world of one gives back what went in."""
    comm = subject.backend.comm([0], "tp", _LIMITS)
    assert (comm.rank, comm.world) == (0, 1), f"rank {comm.rank} of {comm.world}"
    x = torch.arange(12.0).view(6, 2)
    subject.equal("all_reduce_", comm.all_reduce_(subject.put(x)), x)
    subject.equal("all_gather", comm.all_gather(subject.put(x)), x)
    subject.equal("reduce_scatter", comm.reduce_scatter(subject.put(x)), x)
    subject.equal("all_to_all_v", comm.all_to_all_v(subject.put(x), [6], [6]), x)
    subject.equal("broadcast", comm.broadcast(subject.put(x), 0), x)
    comm.close()
    comm.close()


@check("L1/collectives/two-ranks")
def test_two_ranks_agree(target: Target) -> None:
    """Sums, gathers, scatters, uneven exchanges, broadcasts and messages between two spawned processes."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **target.info.env, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        meet = str(Path(folder) / "meet")
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "core_conformance.collective_rank", target.info.load, str(rank), meet],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            answers = [process.communicate(timeout=120) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    for rank, (out, err) in enumerate(answers):
        lines = [line for line in out.splitlines() if line.startswith("result:")]
        last = (err.strip().splitlines() or [""])[-1]
        assert lines, f"rank {rank} ended with {ranks[rank].returncode} and no result: {last}"
        result = json.loads(lines[-1].removeprefix("result:"))
        if result["unsupported"]:
            raise UnsupportedOutcome(result["unsupported"])
        assert not result["wrong"], f"rank {rank}: {'; '.join(result['wrong'])}"

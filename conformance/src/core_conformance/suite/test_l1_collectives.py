"""L1: collectives, of one rank in this process and of two ranks in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from core.backend import CommLimits
from core_conformance.checks import check
from core_conformance.operations.collective_rank import RESULT, info_json
from core_conformance.operations.rank_cases import CASES, WORLD
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Mismatch, Subject
from core_conformance.target import Target

_LIMITS = CommLimits(max_bytes=1 << 16, dtypes=(torch.float32, torch.bfloat16))
_DTYPES = ("bf16", "fp16", "fp32")


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


@pytest.fixture(scope="session")
def answers(target: Target) -> list[dict[str, str] | str]:
    """What each of two spawned ranks says of every case, or why it said nothing; they run once."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **target.info.env, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "core_conformance.operations.collective_rank", info_json(target.info)]
        meet, pipe = str(Path(folder) / "meet"), subprocess.PIPE
        ranks = [
            subprocess.Popen([*command, str(rank), meet], env=env, stdout=pipe, stderr=pipe, text=True)
            for rank in range(WORLD)
        ]
        try:
            outs = [process.communicate(timeout=180) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    return [_answer(process.returncode, out, err) for process, (out, err) in zip(ranks, outs, strict=True)]


def _answer(code: int, out: str, err: str) -> dict[str, str] | str:
    lines = [line for line in out.splitlines() if line.startswith(RESULT)]
    if not lines:
        return f"ended with {code} and no result: {(err.strip().splitlines() or [''])[-1]}"
    found: dict[str, str] = json.loads(lines[-1].removeprefix(RESULT))
    return found


def _check(answers: list[dict[str, str] | str], case: str) -> None:
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise Mismatch(f"rank {rank} {answer}")
        if answer[case].startswith("unsupported: "):
            raise UnsupportedOutcome(answer[case].removeprefix("unsupported: "))
        if answer[case]:
            raise Mismatch(f"rank {rank}: {answer[case]}")


@check("L1/collectives/two-ranks", [name for name in CASES if not name.startswith("op-")])
def test_two_ranks_agree(answers: list[dict[str, str] | str], variant: str) -> None:
    """Sums, gathers, scatters, uneven exchanges, broadcasts and messages between two spawned processes."""
    _check(answers, variant)


@check("L1/dispatch/two-ranks", _DTYPES)
def test_dispatch_over_two_ranks(answers: list[dict[str, str] | str], variant: str) -> None:
    """Other numbers of tokens on each rank: all rows come to all ranks, padding has no expert."""
    _check(answers, f"op-dispatch_combine-{variant}")


@check("L1/combine/two-ranks", _DTYPES)
def test_combine_over_two_ranks(answers: list[dict[str, str] | str], variant: str) -> None:
    """Each rank gets the sum of its own rows."""
    _check(answers, f"op-dispatch_combine-{variant}")


@check("L1/reduce_norm/two-ranks", _DTYPES)
def test_reduce_norm_over_two_ranks(answers: list[dict[str, str] | str], variant: str) -> None:
    """The sum over the ranks, residual and norm, on both."""
    _check(answers, f"op-reduce_norm-{variant}")


@check("L1/reduce_norm/scatter", _DTYPES)
def test_reduce_norm_that_scatters(answers: list[dict[str, str] | str], variant: str) -> None:
    """Each rank keeps its own rows of sum and norm."""
    _check(answers, f"op-reduce_norm-scatter-{variant}")

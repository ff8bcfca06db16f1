"""Scheduler and KV cache know no torch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import core.kv, core.sched, core.kv.tiers, core.kv.groups, core.sched.scheduler
heavy = sorted({"torch", "numpy", "transformers"} & set(sys.modules))
sys.exit("imported " + ", ".join(heavy) if heavy else 0)
"""


def test_kv_and_sched_import_neither_torch_nor_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

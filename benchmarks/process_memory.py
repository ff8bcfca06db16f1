"""Memory and processor time of a process and of all that it started, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_seconds", "process_tree", "resident_bytes"]


def process_tree(root: int) -> list[int]:
    """Ids of `root` and of every living process below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has just ended
            children.setdefault(int(text[text.rindex(")") + 2 :].split()[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def cpu_seconds(root: int) -> float:
    """Processor time of `root`, of all below it, and of those below it that have ended and were waited for."""
    total = 0
    for pid in process_tree(root):
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        total += sum(int(word) for word in text[text.rindex(")") + 2 :].split()[11:15])
    return total / os.sysconf("SC_CLK_TCK")


def resident_bytes(root: int) -> int:
    """Bytes in memory of `root` and all below it; what several of them share counts once (the kernel's PSS)."""
    total = 0
    for pid in process_tree(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total

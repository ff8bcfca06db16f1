"""The ways in which a request may be run through an engine, by name; none of them may change what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from core_conformance.engines.drafters import GoldenDrafter
from core_conformance.engines.goldens import Golden
from core_conformance.engines.rig import Rig, engine
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Subject

__all__ = ["SCHEDULES", "SWAP_SPACE", "need_swap", "scheduled"]

SWAP_SPACE = 1 << 27
"""Bytes of host memory for swapping."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {},
    "sync": {"async_scheduling": False},
    "chunks": {"max_num_batched_tokens": 7},
    "recompute": {"force_preemption": True},
    "recompute-sync": {"force_preemption": True, "async_scheduling": False, "cache": {"enable_prefix_caching": False}},
    "swap": {"force_preemption": True, "preemption_mode": "swap", "cache": {"swap_space_bytes": SWAP_SPACE}},
    "drafts": {},
}
"""Arguments of `engine`; "drafts" adds a random drafter."""


def need_swap(subject: Subject) -> None:
    """Ends the check where the backend declares that it cannot swap."""
    if not subject.backend.capabilities.swap:
        raise UnsupportedOutcome("capabilities.swap is False")


@contextmanager
def scheduled(
    subject: Subject, model: str, schedule: str, goldens: Sequence[Golden] = (), **options: Any
) -> Iterator[Rig]:
    """An engine under a key of `SCHEDULES`; at its end something must have been preempted where that was forced.

    Args:
        subject: The backend.
        model: Which of the suite's models.
        schedule: The key.
        goldens: What the drafter of "drafts" knows.
        options: Further arguments of `engine`.
    """
    options = {**SCHEDULES[schedule], **options}
    if options.get("preemption_mode") == "swap":
        need_swap(subject)
    if schedule == "drafts":
        options.setdefault("drafter", GoldenDrafter("random", goldens))
    with engine(subject, model, **options) as rig:
        yield rig
        if options.get("force_preemption"):
            assert rig.engine.stats().num_preemptions > 0, "nothing was preempted: the check shows nothing"

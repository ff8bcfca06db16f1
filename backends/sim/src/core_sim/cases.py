"""Checks of the simulated chip's own rules, run by the conformance suite beside its own."""

from __future__ import annotations

import torch

from core.backend import Backend

__all__ = ["late_copies", "poisoned_memory"]


def late_copies(backend: Backend) -> None:
    """A copy to the host holds garbage until it is waited for, and then what the tensor held when it was asked for."""
    source = torch.arange(4.0)
    target, pending = backend.to_host(source)
    assert not torch.equal(target, source), "the copy arrived before anyone waited"
    expected = source.clone()
    source.zero_()
    pending.wait()
    assert torch.equal(target, expected), f"the copy holds {target.tolist()}"


def poisoned_memory(backend: Backend) -> None:
    """Memory is full of NaN when it is handed out."""
    memory = backend.arena("kv", 64).tensor
    assert bool(memory.view(torch.float32).isnan().all()), "memory was handed out clean"

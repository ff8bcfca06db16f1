"""Every operation in plain torch: the oracle of the conformance suite, the composite fallback, the specification."""

from __future__ import annotations

from core.backend.reference.registry import COMPOSITES, DECOMPOSITIONS

__all__ = ["COMPOSITES", "DECOMPOSITIONS"]

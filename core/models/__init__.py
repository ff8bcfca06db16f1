"""Models: one file an architecture, built of `core.layers`, speaking to hardware through contract operations alone."""

from __future__ import annotations

from core.models.base import CausalLM
from core.models.registry import BUILT_IN, build_model, describe, find_model

__all__ = ["BUILT_IN", "CausalLM", "build_model", "describe", "find_model"]

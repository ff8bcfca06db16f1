"""An LLM inference core in which hardware comes first. Importing it is light; what needs torch is loaded when used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.llm import LLM
    from core.outputs import CompletionOutput, RequestOutput
    from core.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "core.llm",
    "CompletionOutput": "core.outputs",
    "RequestOutput": "core.outputs",
    "SamplingParams": "core.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'core' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

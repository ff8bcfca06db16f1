"""Finding models, opening their weights and handing them out by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from core.loader.hub import cache_home, pull, resolve_model
from core.loader.package_models import PACKAGE_MODELS

if TYPE_CHECKING:
    from core.loader.checkpoint import Checkpoint, QuantizedTensor, TensorInfo, open_checkpoint
    from core.loader.weights import ModelWeights

__all__ = [
    "PACKAGE_MODELS",
    "Checkpoint",
    "ModelWeights",
    "QuantizedTensor",
    "TensorInfo",
    "cache_home",
    "open_checkpoint",
    "pull",
    "resolve_model",
]

_WITH_TORCH = {
    "Checkpoint": "checkpoint",
    "ModelWeights": "weights",
    "QuantizedTensor": "checkpoint",
    "TensorInfo": "checkpoint",
    "open_checkpoint": "checkpoint",
}


def __getattr__(name: str) -> Any:
    # The server resolves names and never opens weights: it must not pay for importing torch.
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(f"core.loader.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

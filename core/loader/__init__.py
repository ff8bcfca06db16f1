"""Finding models, opening their weights and handing them out by name."""

from __future__ import annotations

from core.loader.checkpoint import Checkpoint, QuantizedTensor, TensorInfo, open_checkpoint
from core.loader.hub import cache_home, pull, resolve_model
from core.loader.package_models import PACKAGE_MODELS
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

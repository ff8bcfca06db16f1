"""Finding models, opening their weights and handing them out by name."""

from __future__ import annotations

from core.loader.checkpoint import Checkpoint, QuantizedTensor, TensorInfo, open_checkpoint

__all__ = ["Checkpoint", "QuantizedTensor", "TensorInfo", "open_checkpoint"]

"""Ascend NPUs for core-inference, driven through torch_npu."""

from __future__ import annotations

import os

# torch would import torch_npu by itself, and fail with it where CANN is missing; `open` imports it and says what to do.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

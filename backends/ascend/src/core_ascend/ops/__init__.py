"""The operations that torch_npu has a call for: one file for each part of a model."""

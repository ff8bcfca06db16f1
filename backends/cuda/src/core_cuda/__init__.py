"""NVIDIA GPUs as a backend of core-inference."""

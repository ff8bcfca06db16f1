"""Triton kernels: device code alone, in the subset that Triton 3.2 compiles too. Nothing of the core in here."""

"""Portable Triton kernels for the operations of the contract, and what binds them for a target."""

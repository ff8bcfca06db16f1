"""CPU backend of the inference core: C++ kernels for every x86-64 level in one build.

`core_cpu.plugin` announces the backend, `core_cpu.backend` is it, `core_cpu.kernels` are its operations over tensors,
and `core_cpu._kernels` is the extension, usable without torch.
"""

from __future__ import annotations

"""COMPILED: every build of every kernel through the real compilers for every target, on a machine without any of them.

What comes out is machine code, and its registers, spills, shared memory and matrix instructions are read from it.
Nothing runs: races, missing barriers, speed and drivers are not seen. `python -m core_triton.aot --help` says more.
"""

"""The same kernel sources for Ascend: lowered with triton-ascend and compiled to memory-planned HIVM by bishengir.

Its own environment: triton-ascend lays its files over those of Triton (`nox -s compiled_ascend`). The last tool of the
chain, which makes NPU code of HIVM, comes with CANN alone; a stand-in takes its place, so that bishengir's exit code
says whether everything before it was accepted. No NPU code is made, and none runs. For a few kernels the lowered IR is
run on the host, with numbers to compare.
"""

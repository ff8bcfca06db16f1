"""`core/` knows no hardware: no vendor's name, no kernel library, not even in a comment."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from markdown_blocks import REPO_ROOT

VENDOR_WORDS = (
    *("cuda", "cudnn", "cublas", "cutlass", "nvidia", "nvlink", "nccl", "hopper", "blackwell", "tensorrt"),
    *("rocm", "hip", "rccl", "miopen", "amd", "cdna", "instinct", "aiter"),
    *("ascend", "npu", "hccl", "huawei", "cann", "davinci", "torch_npu"),
    *("intel", "xpu", "gaudi", "habana", "oneccl", "openvino", "ipex", "sycl", "hpu"),
    *("apple", "mps", "metal", "tpu", "xla", "pallas", "mlu", "cambricon", "musa", "iluvatar", "kunlun", "qualcomm"),
    *("triton", "tilelang", "flashinfer", "flash_attn", "xformers"),
)
KERNEL_LIBRARIES = {
    *("triton", "tilelang", "flash_attn", "flashinfer", "xformers", "torch_npu", "cupy", "numba", "pybind11"),
    *("core_cpu", "core_sim", "core_cuda", "core_rocm", "core_ascend", "core_conformance"),
}
PATTERN = re.compile(rf"(?<![a-z])({'|'.join(VENDOR_WORDS)})(?![a-z])", re.IGNORECASE)


def sources() -> list[Path]:
    found = [path for path in (REPO_ROOT / "core").rglob("*") if path.suffix in (".py", ".typed", ".json", ".jinja")]
    assert len(found) > 60
    return found


def vendor_names(text: str) -> list[str]:
    """Lines of the text that name a vendor or its software."""
    return [line.strip() for line in text.splitlines() if PATTERN.search(line)]


@pytest.mark.parametrize(
    "line",
    ["x = torch.cuda.device_count()", "# as NCCL does", "def hip_stream(): ...", "AMD", "my_npu_id", "CUDA_HOME"],
)
def test_a_vendors_name_is_seen(line: str) -> None:
    assert vendor_names(line) == [line.strip()]


@pytest.mark.parametrize("line", ["ascending ids", "the ship", "relationship", "num_gpu_blocks", "samples", "metallic"])
def test_ordinary_words_are_not(line: str) -> None:
    assert vendor_names(line) == []


def test_core_names_no_vendor() -> None:
    found = {path: vendor_names(path.read_text(encoding="utf-8")) for path in sources()}
    assert {str(path.relative_to(REPO_ROOT)): lines for path, lines in found.items() if lines} == {}


def test_core_imports_no_kernel_library() -> None:
    found: list[str] = []
    for path in sources():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name}: {name}" for name in names if name.partition(".")[0] in KERNEL_LIBRARIES]
    assert found == []

"""The repaired interpreter: values of bfloat16 and 8-bit floats as a chip has them, and loud errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from core_triton import interpreter

interpreter.install()

import interpreted_kernels as kernels  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_cast_rounds_to_nearest_even_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 4
    out = torch.empty(4096, dtype=dtype)
    kernels.cast[(1,)](x, out, 4096)
    assert torch.equal(out.float(), x.to(dtype).float())


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_product_multiplies_values_and_not_bit_patterns(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    kernels.product[(1,)](a, b, out, 32, "ieee")
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-5, rtol=1e-5)


def test_a_float32_product_loses_bits_unless_ieee_is_asked_for() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(32, 32, generator=generator) for _ in range(2))
    exact, rounded = torch.empty(32, 32), torch.empty(32, 32)
    kernels.product[(1,)](a, b, exact, 32, "ieee")
    kernels.product[(1,)](a, b, rounded, 32, "tf32")
    assert (exact - a @ b).abs().max() < 1e-5 < 1e-4 < (rounded - a @ b).abs().max()


def test_integer_products_are_exact() -> None:
    a, b = (torch.randint(-128, 128, (32, 32), dtype=torch.int8) for _ in range(2))
    out = torch.empty(32, 32, dtype=torch.int32)
    kernels.product[(1,)](a, b, out, 32, "ieee")
    assert torch.equal(out, (a.int()[:, :, None] * b.int()).sum(1).int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_arithmetic_that_no_chip_does_is_an_error(dtype: torch.dtype) -> None:
    x = torch.ones(32).to(dtype)
    with pytest.raises(InterpreterError, match=r"binary_op on .* go through \.to\(tl\.float32\)"):
        kernels.doubled[(1,)](x, torch.empty_like(x), 32)
    with pytest.raises(InterpreterError, match="reduction of"):
        kernels.summed[(1,)](x, torch.empty_like(x), 32)


def test_an_access_outside_of_the_tensors_is_an_error_and_a_masked_lane_is_none() -> None:
    x, out = torch.ones(64), torch.empty(64)
    kernels.shifted[(1,)](x, out, 8, 64)
    assert out.sum() == 56
    with pytest.raises(InterpreterError, match="reads 4 bytes outside of every tensor"):
        kernels.shifted[(1,)](x[1:], out, -1, 64)


def test_a_process_that_compiles_is_told_how_to_start() -> None:
    code = "import triton; from core_triton import interpreter; interpreter.install()"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "imported for compiling" in done.stderr and "TRITON_INTERPRET=1" in done.stderr


def test_operations_are_listed_without_importing_triton() -> None:
    code = "import sys; from core_triton import ops; ops.load(); print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

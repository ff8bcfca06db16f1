"""Three kernels' lowered IR, run on the host against torch; and the same kernels with a bug, which must be noticed.

Sources, signatures and constants are those of the real builds.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import CoreError
from core_triton.aot.ascend.host import HostKernel
from core_triton.aot.ascend.lowering import builds
from core_triton.registry import Build

__all__ = ["CASES", "Case", "Checked", "check"]

CHIP = "Ascend910B1"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One kernel's error on the host.

    Args:
        case: Name of the case.
        bug: What was planted; empty for the kernel as it is.
        error: Largest difference from torch, over the largest value.
        bound: What rounding explains.
        refused: Why it could not be run; empty where it ran.
    """

    case: str
    bug: str
    error: float
    bound: float
    refused: str = ""

    @property
    def ok(self) -> bool:
        """Whether a right kernel is right, or a bug was noticed in the numbers."""
        return not self.refused and (self.error <= self.bound) == (not self.bug)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One build and how it is called.

    Args:
        op: The operation's name.
        label: The build's label.
        run: Calls it and returns (what it wrote, what torch says).
        bound: Largest relative error that rounding explains.
        bugs: What is planted, as (words for people, text of the source, text in its place).
    """

    op: str
    label: str
    run: Callable[[Build, HostKernel], tuple[Tensor, Tensor]]
    bound: float
    bugs: tuple[tuple[str, str, str], ...]


def _launch(build: Build, kernel: HostKernel, grid: Sequence[int], **values: Any) -> None:
    """Tensors and numbers by name; a pointer that is not read gets the first tensor, a number that is not is 0."""
    order = [name for name in build.kernel.arg_names if name in build.signature]
    unread = next(value for value in values.values() if isinstance(value, Tensor))
    blanks = {name: unread if build.signature[name].startswith("*") else 0 for name in order}
    strange = sorted(set(values) - set(order))
    if strange:
        raise CoreError(f"the kernel of {build.label} has no argument {strange[0]}: bring numbers.py in line with it")
    kernel(grid, *({**blanks, **values}[name] for name in order))


def _rms_norm(build: Build, kernel: HostKernel) -> tuple[Tensor, Tensor]:
    rows, dim, eps = 6, 4000, 0.5
    x, residual = torch.randn(rows, dim).bfloat16(), torch.randn(rows, dim).bfloat16()
    weight, out = torch.rand(dim).bfloat16() + 0.5, torch.zeros(rows, dim).bfloat16()
    total = (x.float() + residual.float()).bfloat16().float()
    _launch(
        build,
        kernel,
        (-(-rows // build.constexprs["ROWS"]),),
        x=x,
        residual=residual,
        weight=weight,
        out=out,
        num_rows=rows,
        heads=1,
        dim=dim,
        x_stride=dim,
        residual_stride=dim,
        eps=eps,
    )
    return out.float(), torch.nn.functional.rms_norm(total, (dim,), weight.float(), eps)


def _linear(build: Build, kernel: HostKernel) -> tuple[Tensor, Tensor]:
    rows, columns, depth = 200, 150, 304
    x, weight, bias = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    out = torch.zeros(rows, columns).bfloat16()
    size = build.constexprs
    share = -(-depth // size["BLOCK_K"]) * size["BLOCK_K"]
    _launch(
        build,
        kernel,
        (-(-rows // size["BLOCK_M"]) * -(-columns // size["BLOCK_N"]), 1),
        x=x,
        weight=weight,
        bias=bias,
        out=out,
        num_rows=rows,
        num_columns=columns,
        depth=depth,
        split_depth=share,
        x_stride=depth,
        weight_stride=depth,
    )
    return out.float(), x.float() @ weight.float().T + bias.float()


def _decode(build: Build, kernel: HostKernel) -> tuple[Tensor, Tensor]:
    size = build.constexprs
    page, group, dim = size["PAGE"], size["GROUP"], size["HEAD_DIM"]
    lens, kv_heads = (5, 3 * page + 11, page), 2
    heads = group * kv_heads
    planes = [torch.randn(16, page, kv_heads, dim).bfloat16() for _ in range(2)]
    # Block 0 is the null block: no request owns it.
    table = (torch.randperm(15)[: 3 * 5] + 1).reshape(3, 5).int()
    query, scale = torch.randn(3, heads, dim).bfloat16(), dim**-0.5
    out, lse = torch.zeros(3, heads, dim), torch.zeros(3, heads)
    _launch(
        build,
        kernel,
        (3, kv_heads, 1),
        query=query,
        key=planes[0],
        value=planes[1],
        out=out,
        lse=lse,
        scale=scale,
        starts=torch.arange(4).int(),
        seq_lens=torch.tensor(lens).int(),
        block_table=table,
        num_requests=3,
        num_tokens=3,
        q_stride=heads * dim,
        q_head_stride=dim,
        k_block_stride=planes[0].stride(0),
        k_stride=planes[0].stride(1),
        k_head_stride=dim,
        v_block_stride=planes[1].stride(0),
        v_stride=planes[1].stride(1),
        v_head_stride=dim,
        table_stride=table.stride(0),
    )
    wanted = torch.zeros(3, heads, dim)
    for r, length in enumerate(lens):
        k, v = (plane[table[r].long()].flatten(0, 1)[:length].float() for plane in planes)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        logits = torch.einsum("hd,thd->ht", query[r].float(), k) * scale
        wanted[r] = torch.einsum("ht,thd->hd", logits.softmax(-1), v)
    return out, wanted


CASES = (
    Case(
        op="rms_norm",
        label="rms_norm bf16 4096",
        run=_rms_norm,
        bound=1e-2,
        bugs=(("eps left out", "tl.rsqrt(mean + eps)", "tl.rsqrt(mean)"),),
    ),
    Case(
        op="linear",
        label="linear bf16 prefill",
        run=_linear,
        bound=1e-2,
        bugs=(
            (
                "columns of the weight one off",
                "weight_stride,\n        column_mask",
                "weight_stride + 1,\n        column_mask",
            ),
        ),
    ),
    Case(
        op="attention",
        label="decode bf16 head 128",
        run=_decode,
        bound=1e-2,
        bugs=(
            ("rescale dropped", "summed * rescale[:, None] + tl.dot", "summed + tl.dot"),
            ("mask off by one", "keys[None, :] <= position[:, None]", "keys[None, :] < position[:, None]"),
        ),
    ),
)


def check() -> list[Checked]:
    """Every case as it is, then with each of its bugs."""
    found = []
    for case in CASES:
        build = next(build for op, build in builds(CHIP) if (op, build.label) == (case.op, case.label))
        found.append(_measured(case, "", build, build.kernel))
        found += [_measured(case, bug, build, _mutant(build.kernel, old, new)) for bug, old, new in case.bugs]
    return found


def _measured(case: Case, bug: str, build: Build, kernel: Any) -> Checked:
    torch.manual_seed(0)
    name = f"{case.op} [{case.label}]"
    try:
        out, wanted = case.run(build, HostKernel(kernel, build.signature, build.constexprs))
    except CoreError as error:
        return Checked(case=name, bug=bug, error=float("inf"), bound=case.bound, refused=str(error))
    apart = ((out - wanted).abs().max() / wanted.abs().max()).item()
    return Checked(case=name, bug=bug, error=float("inf") if math.isnan(apart) else apart, bound=case.bound)


def _mutant(kernel: Any, old: str, new: str) -> Any:
    """The kernel of a copy of its module in which `old`, which is there once, reads `new`."""
    module = sys.modules[kernel.fn.__module__]
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise CoreError(f"{old!r} is {text.count(old)} times in {module.__name__}: bring numbers.py in line with it")
    place = Path(tempfile.mkdtemp(prefix="mutant-")) / f"{module.__name__.rpartition('.')[2]}.py"
    place.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mutant_{place.parent.name.replace('-', '_')}", place)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    spec.loader.exec_module(copy)
    return getattr(copy, kernel.fn.__name__)

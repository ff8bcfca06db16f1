"""flash-attn as a provider of attention: through a stand-in with the signature of its call, over the same cache."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from simulated import simulated
from torch import Tensor

from core.backend import UnsupportedError
from core.backend.ops import AttentionOp
from core.spec import DeviceInfo, DType
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_attention import attention_op, check_attention
from core_cuda import providers
from core_cuda.backend import CudaBackend

H100 = DeviceInfo(index=0, arch="sm_90", memory_bytes=0, sdk="")


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What the documentation of flash-attn 2 says of the call, for a paged cache; in float64."""
    assert block_table is not None and k.shape[1] % 256 == 0, "pages are multiples of 256 tokens"
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    assert max_seqlen_k >= int(cu_seqlens_k.diff().max()) and max_seqlen_q >= int(cu_seqlens_q.diff().max())
    out = torch.full_like(q, torch.nan)
    for request, (queries, keys) in enumerate(zip(cu_seqlens_q.diff(), cu_seqlens_k.diff(), strict=True)):
        rows = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
        pages = block_table[request, : -(-int(keys) // k.shape[1])].long()
        repeat = q.shape[1] // k.shape[2]
        key, value = (x[pages].flatten(0, 1)[: int(keys)].double().repeat_interleave(repeat, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[rows].double(), key) * softmax_scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        offset = torch.arange(int(keys))[None, :] - (torch.arange(int(queries))[:, None] + int(keys) - int(queries))
        left, right = window_size
        hidden = (offset > 0) & causal | (offset < -left) & (left >= 0) | (offset > right) & (right >= 0)
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype)
    return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setenv(providers.VARIABLE, "flash_attn")
    return


@pytest.mark.parametrize("changes", [{}, {"window": 7}, {"softcap": 20.0}, {"causal": False}], ids=str)
def test_the_provider_answers_as_the_contract_says(flash: None, changes: dict[str, Any]) -> None:
    with simulated("cuda", "sm_90") as target:
        subject = Subject(target)
        assert subject.block_size == 256
        check_attention(subject, attention_op(DType.BFLOAT16, **changes), [1, 1, 3, 9], [1, 258, 3, 9])


def test_padding_is_finite_whatever_the_null_block_holds(flash: None) -> None:
    plan: Any = type("P", (), {"batch": type("B", (), {"num_valid_tokens": torch.tensor([1], dtype=torch.int32)})})
    out = providers._without_padding(torch.full((3, 1, 2), torch.nan).index_fill_(0, torch.tensor([0]), 5.0), plan)
    assert out.flatten().tolist() == [5.0, 5.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (attention_op(DType.FLOAT32), "wants bfloat16 or float16"),
        (attention_op(DType.BFLOAT16, features=frozenset({"sinks"})), "has no sinks"),
        (attention_op(DType.BFLOAT16, v_head_dim=32), "wants keys and values of one size"),
    ],
    ids=["float32", "sinks", "sizes"],
)
def test_what_the_provider_cannot_do_is_refused_and_not_done_otherwise(
    flash: None, op: AttentionOp, words: str
) -> None:
    verdict = CudaBackend().supports(op, H100)
    assert verdict.kind == "NO" and words in verdict.reason and "unset CORE_CUDA_ATTENTION" in verdict.reason
    with pytest.raises(UnsupportedError, match=words):
        CudaBackend().bind(op)


@pytest.mark.parametrize(
    ("value", "words"),
    [("flash_attn", "flash_attn is not installed; pip install flash-attn, or unset it"), ("x", "x is no provider")],
)
def test_a_choice_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv(providers.VARIABLE, value)
    verdict = CudaBackend().supports(attention_op(DType.BFLOAT16), H100)
    assert verdict.kind == "NO" and words in verdict.reason


@pytest.mark.parametrize("value", ["", "triton"])
def test_without_a_choice_the_own_kernel_is_taken(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(providers.VARIABLE, value)
    verdict = CudaBackend().supports(attention_op(DType.BFLOAT16), H100)
    assert verdict.kind == "NATIVE" and verdict.reason == ""

"""Expected times: counted from real tensors, for every operation of the contract, on chips with published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from core.backend.ops import OPERATIONS, AttentionOp, ExpertsOp, LinearOp
from core.backend.schemes import quantize_fp8_block
from core.errors import CoreError
from core.spec import DType
from core_triton.roofline import CHIPS, Sizes, cost_of, expected
from core_triton.roofline.__main__ import main
from core_triton.roofline.costs import COSTS
from core_triton.target import TARGETS

BF16 = DType.BFLOAT16
BETWEEN_RANKS_OR_BLOCKS = {"dispatch", "combine", "export_blocks", "import_blocks", "move_tokens"}


def attention(**changes: object) -> AttentionOp:
    fields = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 32, "kv_dtype": BF16, "scale": 1.0}
    return AttentionOp(dtype=BF16, **(fields | changes))  # type: ignore[arg-type]


def test_every_operation_of_the_contract_has_a_cost_or_is_traffic() -> None:
    assert set(OPERATIONS) == set(COSTS) | BETWEEN_RANKS_OR_BLOCKS


def test_a_linear_moves_the_bytes_of_its_tensors() -> None:
    x, weight = torch.empty(3, 256, dtype=torch.bfloat16), torch.randn(512, 256)
    q, scale = quantize_fp8_block(weight)
    op = LinearOp(dtype=BF16, in_features=256, out_features=512, scheme="fp8_block")
    cost = cost_of(op, Sizes(tokens=3))
    assert cost.read_bytes == q.nbytes + scale.nbytes + x.nbytes
    assert cost.written_bytes == 3 * 512 * 2 and cost.operations == 2 * 3 * 256 * 512
    assert cost.dtype is DType.FLOAT8_E4M3FN


@pytest.mark.parametrize(("window", "causal"), [(0, True), (0, False), (3, True)])
def test_attention_counts_the_pairs_that_its_mask_leaves(window: int, causal: bool) -> None:
    length = 7
    sizes = Sizes(tokens=2 * length, requests=2, context=length)
    seen = [[k <= q and (not window or k > q - window) for k in range(length)] for q in range(length)]
    pairs = 2 * (sum(map(sum, seen)) if causal else length * length)
    cost = cost_of(attention(window=window, causal=causal), sizes)
    # A window counts as full for its first queries too: at most its triangle too many.
    slack = 2 * window * (window - 1) / 2
    assert pairs <= cost.operations / (2 * 8 * (64 + 32)) <= pairs + slack
    assert cost.read_bytes == 2 * length * (2 * (64 + 32) + 8 * 64) * 2


def test_experts_read_only_those_that_tokens_meet() -> None:
    op = ExpertsOp(dtype=BF16, num_experts=64, hidden_size=32, intermediate_size=16, top_k=1)
    one, many = cost_of(op, Sizes(tokens=1)), cost_of(op, Sizes(tokens=10000))
    weight = 3 * 16 * 32 * 2
    assert one.read_bytes == pytest.approx(weight + 32 * 2) and many.read_bytes > 63.9 * weight


def test_decode_is_bound_by_memory_and_prefill_by_the_matrix_unit() -> None:
    op, chip = LinearOp(dtype=BF16, in_features=4096, out_features=28672), CHIPS["h100-sxm"]
    decode, prefill = expected(op, Sizes(tokens=1), chip), expected(op, Sizes(tokens=4096), chip)
    assert (decode.bound, prefill.bound) == ("memory", "matrix")
    assert decode.seconds == pytest.approx(4096 * 28672 * 2 / 3.35e12, rel=1e-3)
    assert prefill.share(2 * prefill.seconds) == 0.5


def test_every_architecture_of_the_kernels_has_a_chip_with_figures() -> None:
    assert set(TARGETS) - {chip.arch for chip in CHIPS.values()} == set()


def test_a_type_that_a_chip_does_not_multiply_runs_at_the_rate_of_a_wider_one() -> None:
    assert CHIPS["a100-sxm"].rate(DType.FLOAT8_E4M3FN) == CHIPS["a100-sxm"].rate(BF16) == 312e12


def test_the_command_writes_a_file_for_each_operation_and_chip(tmp_path: Path) -> None:
    assert main(["--chip", "h100-sxm", "--chip", "mi300x", "--out", str(tmp_path)]) == 0
    files = sorted(tmp_path.glob("*/*.json"))
    assert len(files) == 2 * len({path.name for path in files})
    entry = json.loads((tmp_path / "h100-sxm" / "deepseek-v3-mla.json").read_text())
    assert entry["spec"]["op"] == "mla" and {step["bound"] for step in entry["steps"]} == {"memory", "matrix"}


def test_a_chip_without_figures_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--chip", "abacus"]) == 2
    assert "no figures of a chip 'abacus'" in capsys.readouterr().err


def test_traffic_between_ranks_has_no_cost_of_the_chip() -> None:
    class Traffic:
        name = "dispatch"

    with pytest.raises(CoreError, match="traffic between ranks"):
        cost_of(Traffic(), Sizes(tokens=1))  # type: ignore[arg-type]

"""The parts of `nox -s bench_peers` that need no other engine: limits, tables, models, ceilings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from core.loader.checkpoint import open_checkpoint

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def machine(*, read: float = 33.0, fp32: float = 232.0, bf16: float = 467.0, int8: float = 928.0) -> Any:
    """A machine whose ceilings were measured twice, the second time a busy one."""
    from ceilings import MEMORY_BYTES, Ceilings

    run = {"read": {str(MEMORY_BYTES): read}, "fp32": fp32, "bf16": bf16, "int8": int8}
    return Ceilings(Path("none"), 2, [], [run, run, {**run, "read": {str(MEMORY_BYTES): read / 2}}])


def smollm2(*, bytes_per_param: float = 2.0, quantized: bool = False) -> Any:
    from ceilings import ModelCosts

    return ModelCosts(
        weight_bytes=int(134.5e6 * bytes_per_param),
        body_params=106_168_320,
        head_params=28_311_552,
        attention_dims=30 * 576,
        kv_bytes=23_040,
        quantized=quantized,
    )


def test_a_single_stream_is_bound_by_reading_the_weights() -> None:
    from ceilings import limit

    assert limit("single", smollm2(), machine()) == pytest.approx(33e9 / (269e6 + 192 * 23_040), rel=0.01)
    assert limit("single", smollm2(bytes_per_param=0.5), machine()) > 3.5 * limit("single", smollm2(), machine())


def test_a_prompt_is_bound_by_the_matrix_peak_of_its_type() -> None:
    from ceilings import limit

    assert limit("prefill_512", smollm2(), machine()) == pytest.approx(2030, rel=0.03)
    assert limit("prefill_2048", smollm2(), machine()) == pytest.approx(1650, rel=0.03)
    assert limit("prefill_512", smollm2(quantized=True), machine()) == pytest.approx(3700, rel=0.05)
    assert limit("prefill_512", smollm2(), machine(bf16=0)) == limit("prefill_512", smollm2(), machine(bf16=232.0))


def test_a_batch_is_bound_by_prompts_and_steps_together() -> None:
    from ceilings import limit

    assert limit("batch_32", smollm2(), machine()) == pytest.approx(930, rel=0.05)
    assert limit("batch_32", smollm2(), machine()) < 32 * limit("single", smollm2(), machine())


def test_the_table_has_medians_and_ratios_by_round() -> None:
    from report import markdown_table

    lines = {
        "m bf16 single": {"limit": 100.0, "rates": {"ours": [50.0, 40.0, 90.0], "other": [25.0, 40.0, 30.0]}},
        "m bf16 ready_s": {"limit": None, "rates": {"ours": [2.0]}},
    }
    head, _, single, ready = markdown_table(lines).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")][-2:] == ["other", "ours / other"]
    assert [cell.strip() for cell in single.strip("|").split("|")] == [
        *("m bf16 single", "100", "50.0", "50%", "30.0", "2.00"),
    ]
    assert "-" in ready and "2.00" in ready


def test_the_plot_has_a_bar_for_each_engine_of_each_line() -> None:
    from report import share_plot

    lines = {"a <b>": {"limit": 10.0, "rates": {"ours": [5.0], "other": [2.0]}}}
    root = ElementTree.fromstring(share_plot(lines, "title & more"))
    texts = [element.text for element in root.iter() if element.text]
    assert {"50%", "20%", "a <b>", "title & more"} <= set(texts)


def test_a_random_model_is_the_same_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import models
    import numpy as np

    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
    heads = {"attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 32}
    entries = [models._entry("general.architecture", "qwen3")]
    entries += [models._entry(f"qwen3.{key}", value) for key, value in {**sizes, **heads}.items()]
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (96, 64), "blk.0.attn_q": (64, 64), "blk.0.ffn_up": (64, 64), "output_norm": (64,)}
    tensors = {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for scheme, error in (("bf16", 0.01), ("q8_0", 0.02), ("q4_0", 0.3)):
        path = tmp_path / f"{scheme}.gguf"
        models._write_gguf(path, entries, iter(tensors.items()), scheme)
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config["hidden_size"] == 64
            for name, wanted in (("model.embed_tokens", "token_embd"), ("model.layers.0.mlp.up_proj", "blk.0.ffn_up")):
                got = checkpoint.load(f"{name}.weight").float().numpy()
                assert np.abs(got - tensors[f"{wanted}.weight"]).max() < error
        costs = models.model_costs(path, quantized=scheme != "bf16")
        assert (costs.head_params, costs.body_params, costs.attention_dims) == (96 * 64, 2 * 64 * 64, 64)
    _, again = models._read(tmp_path / "bf16.gguf")
    assert dict(again()).keys() == tensors.keys()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_ceilings_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ceilings

    monkeypatch.setattr(ceilings, "MEMORY_BYTES", 1 << 24)
    found = ceilings.Ceilings(ceilings.build_ceilings(tmp_path), 1, [1 << 22])
    found.measure()
    assert found.bandwidth(1 << 22) > 1e8
    assert found.peak("int8") >= found.peak("fp32") > 1e8

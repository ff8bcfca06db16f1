"""In which scheme weights are kept: by what is stored, what was asked for, and what the device can do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rig import BareBackend, Rig, load_model, make_binder, read_config
from tiny import make_tiny

from core.backend import Verdict, WeightSource
from core.backend.base import Kind
from core.backend.ops import AttentionOp, EmbedOp, LinearOp, OpSpec, ReduceNormOp
from core.backend.reference import COMPOSITES
from core.errors import UnsupportedError
from core.layers import BuildContext, SchemeChoice, WeightSlice
from core.layers.quantize import QuantizingSource
from core.layers.weights import fits_scheme
from core.loader.checkpoint import open_checkpoint
from core.loader.weights import ModelWeights
from core.models import CausalLM, build_model
from core.spec import DType

TOKENS = random.Random(4).choices(range(256), k=12)


class QuantizedStore:
    """A checkpoint in which some weights are stored in another scheme than they are.

    Args:
        inner: The dense checkpoint.
        scheme_of: Name to scheme.
    """

    def __init__(self, inner: ModelWeights, scheme_of: Callable[[str], str]) -> None:
        self._inner, self._scheme_of = inner, scheme_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def scheme(self, name: str) -> str:
        return self._scheme_of(name)

    def source(self, slices: Sequence[WeightSlice]) -> WeightSource:
        schemes = {self._scheme_of(part.name) for part in slices}
        inner = self._inner.source(slices)
        return inner if schemes != {"int8"} else QuantizingSource(inner, "int8")


class KernelBackend(BareBackend):
    """Runs what it calls NATIVE by the reference."""

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        return COMPOSITES[op.name](op)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"))


def build(
    folder: Path,
    scheme_of: Callable[[str], str] = lambda name: "none",
    verdict: Callable[[OpSpec], Verdict | None] = lambda op: None,
    **context: Any,
) -> tuple[dict[str, SchemeChoice], BuildContext, CausalLM]:
    """A dry build: choices by name, and the context with its table."""
    with open_checkpoint(folder) as checkpoint:
        store: Any = QuantizedStore(ModelWeights(checkpoint), scheme_of)
        binder = make_binder(BareBackend(verdict))
        ctx = BuildContext(binder=binder, dtype=DType.FLOAT32, weights=store, dry=True, **context)
        model = build_model(checkpoint.config, ctx)
    return {name: choice for choice in model.weight_schemes() for name in choice.names}, ctx, model


def stored_as(scheme: str, *parts: str) -> Callable[[str], str]:
    return lambda name: scheme if not parts or any(part in name for part in parts) else "none"


def native_for(*schemes: str) -> Callable[[OpSpec], Verdict | None]:
    def verdict(op: OpSpec) -> Verdict | None:
        return Verdict.native() if isinstance(op, LinearOp | EmbedOp) and op.scheme in schemes else None

    return verdict


Q, K, V, DOWN = (
    f"model.layers.0.{part}.weight"
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
)


def test_dense_weights_stay_dense(folder: Path) -> None:
    choices, _, _ = build(folder)
    assert {choice.scheme for choice in choices.values()} == {"none"}
    assert not any(choice.reason for choice in choices.values())


def test_quantized_weights_stay_where_the_device_has_kernels(folder: Path) -> None:
    choices, ctx, _ = build(folder, stored_as("q8_0"), native_for("q8_0"))
    assert {choice.scheme for choice in choices.values()} == {"q8_0"}
    assert {row.op.scheme for row, _ in ctx.binder.table.rows() if isinstance(row.op, LinearOp | EmbedOp)} == {"q8_0"}


def test_quantized_weights_are_dequantized_where_it_has_none(folder: Path) -> None:
    choices, _, _ = build(folder, stored_as("q8_0"))
    assert {choice.scheme for choice in choices.values()} == {"none"}
    assert all("no kernel for" in choice.reason and choice.stored == "q8_0" for choice in choices.values())


def test_dequantizing_can_be_asked_for(folder: Path) -> None:
    choices, _, _ = build(folder, stored_as("q8_0"), native_for("q8_0"), dequantize=True)
    assert {choice.scheme for choice in choices.values()} == {"none"}
    assert choices[DOWN].reason == "dequantizing at load was asked for"


def test_mixed_schemes_in_one_layer(folder: Path) -> None:
    """Query, key and value become three products; gate and up, which must be one, are dequantized."""

    def scheme_of(name: str) -> str:
        return "q4_0" if "v_proj" in name or "gate" in name else "q8_0"

    choices, ctx, _ = build(folder, scheme_of, native_for("q8_0", "q4_0"))
    assert [choices[name].names for name in (Q, K, V)] == [(Q,), (K,), (V,)]
    assert (choices[Q].scheme, choices[V].scheme) == ("q8_0", "q4_0")
    gate_up = choices["model.layers.0.mlp.gate_proj.weight"]
    assert gate_up.scheme == "none" and gate_up.stored == "q4_0+q8_0"
    outputs = {row.op.out_features for row, _ in ctx.binder.table.rows() if isinstance(row.op, LinearOp)}
    assert {64, 32, 2 * 96} <= outputs and 128 not in outputs


def test_a_tied_table_needs_both_operations(tmp_path: Path) -> None:
    folder = make_tiny("LlamaForCausalLM", tmp_path, tie_word_embeddings=True)

    def linear_alone(op: OpSpec) -> Verdict | None:
        return Verdict.native() if isinstance(op, LinearOp) else None

    table = "model.embed_tokens.weight"
    assert build(folder, stored_as("q8_0"), linear_alone)[0][table].scheme == "none"
    assert build(folder, stored_as("q8_0"), native_for("q8_0"))[0][table].scheme == "q8_0"


def test_quantizing_at_load_leaves_embedding_and_head_dense(folder: Path) -> None:
    choices, _, _ = build(folder, quantization="int8")
    dense = {name for name, choice in choices.items() if choice.scheme == "none"}
    assert dense == {"model.embed_tokens.weight", "lm_head.weight"}
    assert choices[DOWN].scheme == "int8" and choices[DOWN].reason == "--quantization int8"
    assert build(folder, quantization="fp8")[0][DOWN].scheme == "fp8_channel"


def test_an_explicit_quantization_never_degrades(folder: Path) -> None:
    """The device says NO to int8: an error that names it, not a dense model."""

    def no_int8(op: OpSpec) -> Verdict | None:
        return Verdict.no("no integer unit") if isinstance(op, LinearOp) and op.scheme == "int8" else None

    with pytest.raises(UnsupportedError, match=r"linear.*scheme=int8.*no integer unit"):
        load_model(folder, backend=BareBackend(no_int8), quantization="int8")


def test_a_dry_build_lists_refusals(folder: Path) -> None:
    """What `core doctor` prints: no opened backend, no weights, every operation judged, none raised."""

    def no_attention(op: OpSpec) -> Verdict | None:
        return Verdict.no("no attention unit") if op.name == "attention" else None

    _, ctx, _ = build(folder, verdict=no_attention)
    names = [row.op.name for row, _ in ctx.binder.table.rows()]
    wanted = {"embed", "rms_norm", "linear", "qk_norm_rope_write", "attention", "reduce_norm", "act_mul"}
    assert set(names) == wanted and [row.op.name for row in ctx.binder.table.refused()] == ["attention"]
    with pytest.raises(AssertionError, match="dry build"):
        ctx.bind(ctx.binder.table.refused()[0].op)(None)


def test_attention_may_round_only_where_activations_may(folder: Path) -> None:
    """Quantizing weights to int8, whose products round activations in any case, does not allow it."""

    def kernel(op: OpSpec) -> Verdict | None:
        if not isinstance(op, AttentionOp):
            return Verdict.native() if isinstance(op, LinearOp) else None
        return Verdict.native(activation_format="int16_row" if op.quantize_activations else None)

    tables = {}
    contexts: tuple[dict[str, Any], ...] = ({}, {"quantization": "int8"}, {"quantize_activations": True})
    for name, context in zip(("plain", "int8", "allowed"), contexts, strict=True):
        _, ctx, _ = build(folder, verdict=kernel, **context)
        tables[name] = ctx.binder.table
    told = {
        name: {row.get("activations") for row in table.to_json() if row["op"] == "attention"}
        for name, table in tables.items()
    }
    assert told == {"plain": {None}, "int8": {None}, "allowed": {"int16_row"}}
    assert tables["plain"].hash != tables["allowed"].hash


def test_a_dry_build_needs_no_opened_backend(folder: Path) -> None:
    binder = make_binder()
    del binder.backend.device, binder.backend.capabilities
    ctx = BuildContext(binder=binder, dtype=DType.BFLOAT16, dry=True)
    build_model(read_config(folder), ctx)
    assert binder.table.count(Kind.COMPOSITE) > 5 and not binder.table.refused()


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.08), ("fp8", 0.12)])
def test_quantized_at_load_is_near_to_dense(folder: Path, quantization: str, bound: float) -> None:
    dense, quantized = (
        Rig(load_model(folder, **options)).run(TOKENS, [12]) for options in ({}, {"quantization": quantization})
    )
    relative = float((quantized - dense).square().mean().sqrt() / dense.square().mean().sqrt())
    assert 0 < relative < bound


@pytest.mark.parametrize("kernels", [True, False])
def test_stored_int8_gives_its_own_answer(folder: Path, kernels: bool) -> None:
    """With kernels the weights stay int8; without, they are dequantized: the same weights, near answers."""
    backend = KernelBackend(native_for("int8")) if kernels else BareBackend()
    with open_checkpoint(folder) as checkpoint:
        store: Any = QuantizedStore(ModelWeights(checkpoint), stored_as("int8", "proj"))
        ctx = BuildContext(binder=make_binder(backend), dtype=DType.FLOAT32, weights=store)
        model = build_model(checkpoint.config, ctx)
        model.load(store)
    packed = model._layers[0].attention._out.weight  # type: ignore[attr-defined]
    assert packed.scheme == ("int8" if kernels else "none")
    got, dense = Rig(model).run(TOKENS, [12]), Rig(load_model(folder)).run(TOKENS, [12])
    assert 0 < float((got - dense).square().mean().sqrt() / dense.square().mean().sqrt()) < 0.08


def test_norms_hand_over_the_format_that_consumers_ask_for(folder: Path) -> None:
    """Only where all consumers want the same, and the device has the kernel that makes it."""

    def kernels(op: OpSpec) -> Verdict | None:
        if isinstance(op, LinearOp) and op.scheme == "int8":
            return Verdict.native(input_format="int8_row")
        return Verdict.native() if isinstance(op, ReduceNormOp) else None

    def formats(verdict: Callable[[OpSpec], Verdict | None]) -> list[tuple[str, ...]]:
        _, ctx, _ = build(folder, verdict=verdict, quantization="int8")
        return [row.op.out_formats for row, _ in ctx.binder.table.rows() if isinstance(row.op, ReduceNormOp)]

    assert sorted(formats(kernels)) == [(), ("int8_row",)]
    assert formats(lambda op: kernels(op) if isinstance(op, LinearOp) else None) == [()]


@pytest.mark.parametrize(
    ("scheme", "rows", "cols", "fits"),
    [
        ("none", (3, 5), (1, 7), True),
        ("q8_0", (3, 5), (0, 64), True),
        ("q8_0", (0, 8), (32, 32), True),
        ("q8_0", (0, 8), (16, 32), False),
        ("fp8_block", (128, 128), (0, 64), True),
        ("fp8_block", (64, 128), (0, 64), False),
    ],
)
def test_where_a_weight_may_be_cut(scheme: str, rows: tuple[int, int], cols: tuple[int, int], fits: bool) -> None:
    part = WeightSlice(name="w", shape=(512, 64), rows=rows, cols=cols)
    assert fits_scheme([part], scheme) is fits


def test_what_may_be_fused() -> None:
    first, last = (WeightSlice.whole(name, 100, 64) for name in "ab")
    assert fits_scheme([first, last], "q8_0") and fits_scheme([first, last], "fp8_channel")
    assert not fits_scheme([first, last], "fp8_block"), "rows of a block would cross the border"
    assert not fits_scheme([first, last], "fp8_tensor"), "one scale is not the neighbour's"

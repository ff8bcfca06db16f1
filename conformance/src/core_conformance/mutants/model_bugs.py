"""Models put together wrongly: what logits against transformers must find."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from core.backend import Batch, Plan
from core.layers import Head
from core.layers.rotary import RotaryEmbedding
from core.models.decoder import Decoder, DecoderLayer
from core.models.decoder_config import DecoderConfig
from core.models.gemma3 import Gemma3ForCausalLM
from core.models.llama import LlamaForCausalLM
from core_conformance.engines import goldens, models
from core_conformance.mutants.variant import Mutant, engine_bug

__all__ = ["MUTANTS"]

Bug = Callable[[], AbstractContextManager[Any]]


def _misread(model: type[Decoder], **changes: Callable[[DecoderConfig], Any]) -> Bug:
    """The configuration is read into other values: field to function of what is right."""

    @contextmanager
    def bug() -> Iterator[None]:
        honest = model.read_config.__func__  # type: ignore[attr-defined]

        def read_config(cls: type[Decoder], config: Any) -> DecoderConfig:
            right: DecoderConfig = honest(cls, config)
            return dataclasses.replace(right, **{name: change(right) for name, change in changes.items()})

        with mock.patch.object(model, "read_config", classmethod(read_config)):
            yield

    return bug


@contextmanager
def _last_norm_left_out() -> Iterator[None]:
    def forward(self: Decoder, batch: Batch, plans: Sequence[Plan], caches: Sequence[Any]) -> Tensor:
        self.prepare(batch)
        residual = self._embedding(batch.token_ids)
        x: Any = self._first_norm(residual)
        for layer, plan, cache in zip(self._layers, plans, caches, strict=True):
            x, residual = layer(x, residual, batch, plan, cache)
        return residual

    with mock.patch.object(Decoder, "forward", forward):
        yield


@contextmanager
def _layers_reversed() -> Iterator[None]:
    honest = Decoder.load

    def load(self: Decoder, weights: Any) -> None:
        honest(self, weights)
        first, last = self._layers[0], self._layers[-1]
        for name in ("_qkv", "_out"):
            mine, theirs = getattr(first.attention, name), getattr(last.attention, name)
            setattr(first.attention, name, theirs)
            setattr(last.attention, name, mine)

    with mock.patch.object(Decoder, "load", load):
        yield


@contextmanager
def _residual_of_the_layer_before() -> Iterator[None]:
    """The feed-forward block's result joins the residual from before the attention."""

    def call(self: DecoderLayer, x: Any, residual: Tensor, batch: Batch, plan: Plan, cache: Any) -> tuple[Any, Tensor]:
        old = residual.clone()
        x, _ = self._after_attention(self.attention(x, batch, plan, cache), residual)
        return self._after_mlp(self._mlp(x), old)

    with mock.patch.object(DecoderLayer, "__call__", call):
        yield


@contextmanager
def _positions_by(positions: Callable[[Batch], Tensor]) -> Iterator[None]:
    honest = RotaryEmbedding.lookup

    def lookup(self: RotaryEmbedding, batch: Batch) -> tuple[Tensor, Tensor]:
        _, table = honest(self, batch)
        return positions(batch).to(torch.int32), table

    with mock.patch.object(RotaryEmbedding, "lookup", lookup):
        yield


def _within_the_step(batch: Batch) -> Tensor:
    starts = batch.query_start_loc.long()
    return torch.arange(batch.num_tokens) - torch.repeat_interleave(starts[:-1], starts.diff())


def _within_the_batch(batch: Batch) -> Tensor:
    """Right for one request, from its first token on."""
    return batch.positions[0] + torch.arange(batch.num_tokens)


@contextmanager
def _logits_of_the_row_before() -> Iterator[None]:
    honest = Head.__call__

    def call(self: Head, hidden: Tensor) -> Tensor:
        return honest(self, hidden.roll(1, dims=0))

    with mock.patch.object(Head, "__call__", call):
        yield


@contextmanager
def _copy_model_of_a_narrow_margin() -> Iterator[None]:
    """A bug of the suite itself: the copy model is sure of nothing."""
    honest = models.hf_model

    def hf_model(name: str, dtype: torch.dtype) -> Any:
        model = honest(name, dtype)
        if name != "copy":
            return model
        unsure = copy.deepcopy(model)
        unsure.lm_head.weight.data.mul_(0.01)
        return unsure

    kept: Any = goldens.ruled
    with mock.patch.object(goldens, "hf_model", hf_model), mock.patch.object(goldens, "ruled", kept.__wrapped__):
        yield


def _model(name: str, first: str, bug: Bug) -> Mutant:
    return engine_bug(name, first, bug, "", level="L2")


_GEMMA = "logits/gemma3"

MUTANTS: tuple[Mutant, ...] = (
    _model("last norm left out", "logits/llama", _last_norm_left_out),
    _model("attention blocks exchanged between layers", "logits/llama", _layers_reversed),
    _model("residual from before the attention", "logits/llama", _residual_of_the_layer_before),
    _model("logits of the row before", "logits/llama-block", _logits_of_the_row_before),
    _model("positions start anew in each step", "chunks", lambda: _positions_by(_within_the_step)),
    _model("positions counted through the batch", "mixed", lambda: _positions_by(_within_the_batch)),
    _model("head reads the embedding", "logits/llama", _misread(LlamaForCausalLM, tied=lambda config: True)),
    _model("epsilon of every norm 1e-2", "logits/llama", _misread(LlamaForCausalLM, norm_eps=lambda config: 1e-2)),
    _model(
        "rope theta of another model",
        "logits/llama-block",
        _misread(
            LlamaForCausalLM,
            ropes=lambda config: tuple(dataclasses.replace(rope, theta=rope.theta * 1.1) for rope in config.ropes),
        ),
    ),
    _model("embedding not scaled", _GEMMA, _misread(Gemma3ForCausalLM, embed_multiplier=lambda config: 1.0)),
    _model("norm weights without their offset", _GEMMA, _misread(Gemma3ForCausalLM, norm_offset=lambda config: 0.0)),
    _model(
        "query scale from the head's size",
        f"{_GEMMA}-block",
        _misread(Gemma3ForCausalLM, attention_scale=lambda config: config.head_dim**-0.5),
    ),
    _model(
        "global rope in every layer",
        f"{_GEMMA}-block",
        _misread(Gemma3ForCausalLM, ropes=lambda config: (config.ropes[-1],) * len(config.ropes)),
    ),
    _model(
        "window forgotten",
        "chunks/gemma3",
        _misread(Gemma3ForCausalLM, windows=lambda config: (0,) * len(config.windows)),
    ),
    _model(
        "window in every layer",
        "chunks/gemma3",
        _misread(Gemma3ForCausalLM, windows=lambda config: (config.windows[0],) * len(config.windows)),
    ),
    _model(
        "window without the token itself",
        "chunks/gemma3",
        _misread(Gemma3ForCausalLM, windows=lambda config: tuple(w + 1 if w else 0 for w in config.windows)),
    ),
    _model("heads not normed", f"{_GEMMA}-block", _misread(Gemma3ForCausalLM, qk_norm=lambda config: False)),
    _model("no norm behind the attention", _GEMMA, _misread(Gemma3ForCausalLM, attention_out_norm=lambda config: None)),
    engine_bug("copy model of a narrow margin", "copy-model", _copy_model_of_a_narrow_margin),
    _model("silu in place of gelu", _GEMMA, _misread(Gemma3ForCausalLM, activation=lambda config: "silu")),
)

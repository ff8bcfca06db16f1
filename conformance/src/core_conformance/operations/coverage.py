"""Which ids of L1 check what of the contract: every operation, parameter, feature, type, scheme and collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from core.backend.comm import Communicator
from core.backend.ops import OpSpec
from core.backend.weights import Scheme

__all__ = ["COVERAGE", "Coverage", "gaps"]

_MODEL = ("bf16", "fp16", "fp32")
_SHARED = frozenset(f.name for f in dataclasses.fields(OpSpec))


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How one operation is checked.

    Args:
        dtypes: Ends of ids that must be there, one a type; empty where the type is always the same.
        sizes: Parameters that every check sets: shapes.
        variants: Other parameters and features to the ids, `*` for any text, in which they differ from plain.
        determinism: The id that keeps its class; empty where it only copies, which every check compares bit by bit.
    """

    dtypes: tuple[str, ...] = _MODEL
    sizes: tuple[str, ...] = ()
    variants: Mapping[str, str] = field(default_factory=dict)
    determinism: str = ""


_HEADS = ("num_heads", "num_kv_heads", "head_dim")

COVERAGE: dict[str, Coverage] = {
    "act_mul": Coverage(
        sizes=("size",), variants={"activation": "L1/act_mul/gelu-*"}, determinism="L1/determinism/act_mul-*"
    ),
    "advance": Coverage(
        dtypes=(),
        sizes=("block_sizes",),
        variants={"num_spec_tokens": "L1/advance/drafts"},
        determinism="L1/determinism/advance-*",
    ),
    "apply_token_bitmask": Coverage(
        dtypes=(), sizes=("vocab_size",), determinism="L1/determinism/apply_token_bitmask-*"
    ),
    "attention": Coverage(
        sizes=_HEADS,
        variants={
            "v_head_dim": "L1/attention/value-dim-*",
            "kv_dtype": "L1/attention/kv8-int8-*",
            "scale": "L1/attention/scale-*",
            "causal": "L1/attention/bidirectional-*",
            "window": "L1/attention/window-*",
            "softcap": "L1/attention/softcap-*",
            "scales": "L1/attention/kv8-e4m3-heads-*",
            "sinks": "L1/attention/sinks-*",
            "lse": "L1/attention/lse-*",
            "ragged": "L1/attention/ragged-*",
            "quantize_activations": "L1/attention/rounded-*",
        },
        determinism="L1/determinism/requests-attention-*",
    ),
    "combine": Coverage(sizes=("hidden_size", "capacity"), variants={"world": "L1/combine/two-ranks-*"}),
    "conv1d": Coverage(
        sizes=("channels",),
        variants={
            "width": "L1/conv1d/form-two-taps-*",
            "activation": "L1/conv1d/form-linear-*",
            "bias": "L1/conv1d/form-no-bias-*",
        },
        determinism="L1/determinism/requests-conv1d-*",
    ),
    "dispatch": Coverage(sizes=("hidden_size", "top_k", "capacity"), variants={"world": "L1/dispatch/two-ranks-*"}),
    "embed": Coverage(
        sizes=("dim",),
        variants={"scheme": "L1/embed/scheme-*", "multiplier": "L1/embed/*"},
        determinism="L1/determinism/embed-*",
    ),
    "experts": Coverage(
        sizes=("num_experts", "hidden_size", "intermediate_size"),
        variants={
            "top_k": "L1/experts/top-1-*",
            "first_expert": "L1/experts/other-ranks-*",
            "activation": "L1/experts/gelu-*",
            "scheme": "L1/experts/scheme-*",
        },
        determinism="L1/determinism/experts-*",
    ),
    "export_blocks": Coverage(sizes=("layout",)),
    "gated_delta": Coverage(
        sizes=("k_dim", "scale"),
        variants={
            "num_k_heads": "L1/gated_delta/form-one-to-one-*",
            "num_v_heads": "L1/gated_delta/form-one-to-one-*",
            "v_dim": "L1/gated_delta/form-square-*",
            "qk_l2norm": "L1/gated_delta/form-no-l2norm-*",
        },
        determinism="L1/determinism/requests-gated_delta-*",
    ),
    "import_blocks": Coverage(sizes=("layout",)),
    "index_topk": Coverage(
        dtypes=(*_MODEL, "kv-e4m3"),
        sizes=("num_heads", "head_dim"),
        variants={"top_k": "L1/index_topk/wide-*", "kv_dtype": "L1/index_topk/*-kv-e4m3"},
        determinism="L1/determinism/requests-index_topk-*",
    ),
    "kv_write": Coverage(
        sizes=("num_kv_heads", "head_dim"),
        variants={
            "v_head_dim": "L1/kv_write/latent-*",
            "kv_dtype": "L1/kv_write/kv8-int8-plain-*",
            "scales": "L1/kv_write/kv8-*-heads-*",
        },
    ),
    "linear": Coverage(
        sizes=("in_features", "out_features", "weight_dtype"),
        variants={
            "scheme": "L1/linear/scheme-*",
            "out_dtype": "L1/linear/float32-out-*",
            "bias": "L1/linear/bias-*",
            "quantize_activations": "L1/linear/rounded-activations-*",
        },
        determinism="L1/determinism/linear-*",
    ),
    "lora_add_": Coverage(
        sizes=("in_features", "out_features", "rank", "num_adapters"), determinism="L1/determinism/lora_add_-*"
    ),
    "merge_lse": Coverage(sizes=("num_heads", "v_head_dim"), determinism="L1/determinism/merge_lse-*"),
    "mla": Coverage(
        dtypes=(*_MODEL, "kv-e4m3"),
        sizes=("num_heads", "latent_dim", "rope_dim", "scale"),
        variants={"kv_dtype": "L1/mla/*-kv-e4m3", "sparse": "L1/mla/sparse-*", "lse": "L1/mla/lse-*"},
        determinism="L1/determinism/requests-mla-*",
    ),
    "mla_prolog": Coverage(
        sizes=("num_heads", "nope_dim", "latent_dim", "rope_dim", "kv_dtype", "eps"),
        variants={"interleaved": "L1/mla_prolog/halves-*"},
    ),
    "move_tokens": Coverage(sizes=("layout",)),
    "qk_norm_rope_write": Coverage(
        sizes=(*_HEADS, "kv_dtype"),
        variants={
            "v_head_dim": "L1/qk_norm_rope_write/form-other-values-*",
            "rotary_dim": "L1/qk_norm_rope_write/form-partial-*",
            "interleaved": "L1/qk_norm_rope_write/form-pairs-*",
            "eps": "L1/qk_norm_rope_write/form-qk-norm-offset-*",
            "weight_offset": "L1/qk_norm_rope_write/form-qk-norm-offset-*",
            "qk_norm": "L1/qk_norm_rope_write/qk-norm-*",
        },
    ),
    "reduce_norm": Coverage(
        sizes=("dim", "eps", "weight_offset"),
        variants={
            "world": "L1/reduce_norm/two-ranks-*",
            "scatter": "L1/reduce_norm/scatter-*",
            "out_formats": "L1/reduce_norm/format-*",
            "post_norm": "L1/reduce_norm/post-norm-*",
        },
        determinism="L1/determinism/reduce_norm-*",
    ),
    "rejection_sample": Coverage(
        dtypes=(),
        sizes=("vocab_size",),
        variants={
            "num_spec_tokens": "L1/rejection_sample/no-drafts",
            "draft_probs": "L1/rejection_sample/probabilities",
        },
        determinism="L1/determinism/rejection_sample-*",
    ),
    "rms_norm": Coverage(
        sizes=("dim", "weight_offset"),
        variants={"eps": "L1/rms_norm/small-*", "residual": "L1/rms_norm/residual-*"},
        determinism="L1/determinism/rms_norm-*",
    ),
    "rope": Coverage(
        sizes=_HEADS,
        variants={"rotary_dim": "L1/rope/partial-*", "interleaved": "L1/rope/pairs-*"},
        determinism="L1/determinism/rope-*",
    ),
    "route": Coverage(
        variants={
            "num_experts": "L1/route/one-of-many-*",
            "top_k": "L1/route/all-*",
            "scoring": "L1/route/sigmoid-*",
            "renormalize": "L1/route/raw-weights-*",
            "num_groups": "L1/route/groups-*",
            "top_k_groups": "L1/route/groups-*",
            "scaling": "L1/route/scaled-*",
            "bias": "L1/route/bias-*",
        },
        determinism="L1/determinism/route-*",
    ),
    "sample": Coverage(
        dtypes=(),
        sizes=("vocab_size",),
        variants={name: f"L1/sample/filtered-{name}" for name in ("top_k", "top_p", "min_p")},
        determinism="L1/determinism/sample-*",
    ),
    "ssd": Coverage(
        sizes=("num_heads", "head_dim", "state_dim"),
        variants={
            "num_groups": "L1/ssd/form-one-group-*",
            "dt_min": "L1/ssd/form-unclamped-*",
            "dt_max": "L1/ssd/form-unclamped-*",
        },
        determinism="L1/determinism/requests-ssd-*",
    ),
}
"""Operation to how it is checked."""

_MATCHED = {"recv": "send"}
"""Collectives that are checked under another's name."""


def gaps(operations: Mapping[str, type[OpSpec]], schemes: Mapping[str, Scheme], ids: Collection[str]) -> list[str]:
    """What of the contract no id of L1 checks, one line each; empty where all is checked.

    Args:
        operations: Every operation.
        schemes: Every scheme of weights.
        ids: Ids of L1.
    """
    found = [f"{name} is checked and is no operation" for name in COVERAGE if name not in operations]
    for name, op in operations.items():
        if name not in COVERAGE:
            found.append(f"operation {name} has no checks: add them, and its line in operations/coverage.py")
        else:
            found += _gaps_of(name, op, COVERAGE[name], ids)
    for scheme in schemes:
        forms = ("linear/dense", "embed", "experts") if scheme == "none" else ("linear", "embed", "experts")
        heads = [f"L1/{form}" if scheme == "none" else f"L1/{form}/scheme-{scheme}-" for form in forms]
        found += [f"scheme {scheme}: no id begins with {head}" for head in heads if not _any(ids, f"{head}*")]
    for method in sorted(Communicator.__abstractmethods__):
        head = f"L1/collectives/two-ranks-{_MATCHED.get(method, method)}-"
        found += [f"collective {method}: no id {head}{dtype}" for dtype in _MODEL if f"{head}{dtype}" not in ids]
    return found


def _gaps_of(name: str, op: type[OpSpec], told: Coverage, ids: Collection[str]) -> Iterator[str]:
    own = [f.name for f in dataclasses.fields(op) if f.name not in _SHARED]
    features = [f.metadata["feature"] for f in dataclasses.fields(op.args) if "feature" in f.metadata]
    for part in [*own, *features]:
        if part not in told.sizes and part not in told.variants:
            yield f"{name}: no id is named for {part}"
    for part in told.sizes:
        if part not in own:
            yield f"{name}: {part} is no parameter of it"
    for part, pattern in told.variants.items():
        if not _any(ids, pattern):
            yield f"{name}: {part} should be checked by {pattern}, which is no id"
    head = f"L1/{name}/"
    if not _any(ids, f"{head}*"):
        yield f"{name}: no id begins with {head}"
    for dtype in told.dtypes:
        if not _any(ids, f"{head}*{dtype}"):
            yield f"{name}: no id ends with {dtype}"
    if told.determinism and not _any(ids, told.determinism):
        yield f"{name}: {told.determinism} is no id"


def _any(ids: Collection[str], pattern: str) -> bool:
    return any(fnmatchcase(check_id, pattern) for check_id in ids)

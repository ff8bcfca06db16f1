"""From an opened device and an opened checkpoint to a ModelRunner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args

from core.backend import Backend, Kind
from core.backend.negotiate import Binder, Observer, judge
from core.backend.ops import Determinism, LinearOp
from core.config import EngineConfig
from core.errors import ConfigError
from core.exec.drafts import Drafter, Proposer
from core.exec.kv_memory import choose_block_size, make_kv_pool
from core.exec.model_runner import ModelRunner
from core.exec.sampler import Sampler
from core.exec.step_graphs import GraphRule, graph_rule
from core.exec.token_masks import TokenMasks
from core.layers import BuildContext
from core.layers.context import Quantization
from core.loader.tensor_info import Checkpoint
from core.loader.weights import ModelWeights
from core.models.base import CausalLM
from core.models.registry import build_model
from core.spec import BackendInfo, DeviceInfo, DType, ModelEntry

__all__ = ["build_context", "build_runner", "choose_dtype", "describe_resolution"]

_ACTIVATIONS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
_SHORT = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"}


def build_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    backend: Backend,
    info: BackendInfo,
    device: DeviceInfo,
    *,
    num_tokenizer_ids: int = 0,
    extra_models: Iterable[ModelEntry] = (),
    progress: Callable[[int, int], None] | None = None,
    observe: Observer | None = None,
    drafter: Drafter | None = None,
    token_masks: TokenMasks | None = None,
) -> ModelRunner:
    """Loads the model and makes it ready to run steps.

    Args:
        checkpoint: Stays the caller's.
        backend: Opened; the runner closes it.
        num_tokenizer_ids: Ids that the tokenizer knows; 0 where unknown.
        extra_models: Architectures of installed packages.
        progress: Called with bytes read and bytes in all.
        observe: Wraps every operation as it is bound; for measurements.
        drafter: Proposes up to `config.scheduler.num_spec_tokens` draft tokens a request and step.
        token_masks: Constrains what requests may say.
    """
    block_size = choose_block_size(config.cache, backend)
    binder = Binder(backend, info, device, block_size=block_size, observe=observe)
    weights = ModelWeights(checkpoint, progress=progress)
    ctx = build_context(config, binder, checkpoint, weights=weights, num_tokenizer_ids=num_tokenizer_ids)
    model = build_model(checkpoint.config, ctx, extra_models)
    model.load(weights)
    # Before the sampler adds its rows: it is in no graph.
    rule = graph_rule(backend, binder.table, enforce_eager=config.enforce_eager, observed=observe is not None)
    sampler = Sampler(binder, model.spec.vocab_size, backend.device, ctx.determinism, masks=token_masks is not None)
    pool = make_kv_pool(config, backend, model.spec, block_size, model.cache_ops)
    proposer = None
    if drafter is not None:
        proposer = Proposer(drafter, config.scheduler.num_spec_tokens, model.spec.vocab_size)
    return ModelRunner(
        backend,
        model,
        sampler,
        pool,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=min(config.max_model_len or model.spec.max_model_len, model.spec.max_model_len),
        rule=rule,
        table=binder.table,
        resolved=describe_resolution(binder, model, ctx.dtype, rule),
        proposer=proposer,
        token_masks=token_masks,
    )


def build_context(
    config: EngineConfig,
    binder: Binder,
    checkpoint: Checkpoint,
    *,
    weights: ModelWeights | None = None,
    num_tokenizer_ids: int = 0,
    dry: bool = False,
) -> BuildContext:
    """What a model of this configuration is built from.

    Raises:
        ConfigError: dtype or quantization is unknown.
    """
    dtype = choose_dtype(config.dtype, str(checkpoint.config.get("dtype") or "bfloat16"), binder)
    kv_dtype = None if config.cache.kv_cache_dtype == "auto" else _parse_dtype(config.cache.kv_cache_dtype)
    return BuildContext(
        binder=binder,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=config.max_model_len or 0,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        num_tokenizer_ids=num_tokenizer_ids,
        quantization=_quantization(config.quantization),
        dequantize=config.dequantize,
        quantize_activations=config.quantize_activations,
        determinism=Determinism.D3 if config.deterministic else Determinism.D0,
        weights=weights if weights is not None else ModelWeights(checkpoint),
        dry=dry,
    )


def choose_dtype(wish: str, stored: str, binder: Binder) -> DType:
    """The type of activations: the operator's, else the checkpoint's where the device has kernels for it.

    "auto" with a type that the device does not do itself takes bfloat16, then float32.
    """
    if wish != "auto":
        return _parse_dtype(wish)
    candidates = [DType(stored)] if stored in _ACTIVATIONS else []
    for dtype in dict.fromkeys([*candidates, DType.BFLOAT16, DType.FLOAT32]):
        op = LinearOp(dtype=dtype, in_features=64, out_features=64, weight_dtype=dtype, out_dtype=dtype)
        if judge(binder.backend, binder.info, op, binder.device).kind is Kind.NATIVE:
            return dtype
    return candidates[0] if candidates else DType.BFLOAT16


def describe_resolution(binder: Binder, model: CausalLM, dtype: DType, rule: GraphRule) -> str:
    """One line for people: device, types, how many operations are native, and which steps are recorded."""
    schemes = sorted({choice.scheme for choice in model.weight_schemes()} - {"none"})
    weights = f", weights {'+'.join(schemes)}" if schemes else ""
    table = binder.table
    return (
        f"{binder.info.name}:{binder.device.index} ({binder.device.arch}), {dtype.value}{weights}, "
        f"{table.count(Kind.NATIVE)} operations NATIVE, {table.count(Kind.COMPOSITE)} COMPOSITE, table {table.hash}, "
        f"{rule.describe()}"
    )


def _parse_dtype(word: str) -> DType:
    name = _SHORT.get(word, word)
    if name not in _ACTIVATIONS:
        raise ConfigError(f"dtype {word!r} is unknown; give one of auto, {', '.join(_ACTIVATIONS)}")
    return DType(name)


def _quantization(word: str | None) -> Quantization | None:
    for known in get_args(Quantization):
        if word == known:
            return known  # type: ignore[no-any-return]
    if word is None:
        return None
    raise ConfigError(f"--quantization {word!r} is unknown; give one of {', '.join(get_args(Quantization))}")

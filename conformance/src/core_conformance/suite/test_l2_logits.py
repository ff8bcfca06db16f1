"""L2: teacher-forced logits of tiny models against transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.errors import UnsupportedError
from core.spec import DType
from core_conformance.checks import check
from core_conformance.engines.goldens import golden_logits, prompt_of
from core_conformance.engines.quantized_models import QUANTIZED, quantized_logits
from core_conformance.engines.stepper import Stepper
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Mismatch, Subject
from core_conformance.tolerance import LOGIT_FLOOR, MODEL_RATIO

_DTYPES = {"fp32": DType.FLOAT32, "bf16": DType.BFLOAT16, "fp16": DType.FLOAT16}
_LENGTHS = ("one", "block-minus-1", "block", "block-plus-1")
_MODELS = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
_WHOLE = [f"{m}-{n}-{d}" for m in _MODELS for n in _LENGTHS for d in ("fp32", "bf16")]
_EACH = [f"{m}-{d}" for m in _MODELS for d in _DTYPES]


def _length(name: str, block_size: int) -> int:
    return {"one": 1, "block-minus-1": block_size - 1, "block": block_size, "block-plus-1": block_size + 1}[name]


def _stepper(subject: Subject, model: str, dtype: DType, quantized: str = "") -> Stepper:
    try:
        return Stepper(subject, model, dtype, quantized=quantized)
    except UnsupportedError as error:
        raise UnsupportedOutcome(str(error)) from error


def _chunks(block_size: int) -> list[int]:
    """Across two block boundaries, single tokens, then a chunk that sees further back than any window."""
    return [block_size - 3, 2, 5, block_size - 4, 1, 1, 1, 26, 1]


def compare(subject: Subject, model: str, tokens: tuple[int, ...], got: Tensor, dtype: DType) -> None:
    """Root mean square error at most MODEL_RATIO times that of transformers in the same type; no outlier."""
    exact = golden_logits(model, tokens, torch.float64)
    judge(subject, f"{model} in {dtype}", got, exact, lambda: golden_logits(model, tokens, torch_dtype(dtype)))


def judge(subject: Subject, what: str, got: Tensor, exact: Tensor, plain: Callable[[], Tensor]) -> None:
    """Compares logits [n, vocabulary] with the exact ones, by the error of those of a plain implementation."""
    error = float((got - exact).square().mean().sqrt())
    floor = LOGIT_FLOOR * float(exact.std())
    bound = MODEL_RATIO * float((plain() - exact).square().mean().sqrt()) + floor
    if subject.ratio is None or error / bound > subject.ratio:
        subject.err, subject.bound, subject.ratio = error, bound, error / bound
    if error <= bound:
        return
    worst = (got - exact).abs().nan_to_num(nan=torch.inf).amax(-1)
    first = int((worst > 6 * bound).nonzero()[0]) if (worst > 6 * bound).any() else int(worst.argmax())
    raise Mismatch(
        f"logits of {what}: root mean square error {error:.3g}, bound {bound:.3g}; first wrong position "
        f"{first} of {len(got)} (block size {subject.block_size}): largest error there {float(worst[first]):.3g}"
    )


@check("L2/logits", _WHOLE)
def test_whole_prompts(subject: Subject, variant: str) -> None:
    """A prompt of one token, and prompts around the block size, each in one step."""
    model, rest = variant.split("-", 1)
    name, dtype = rest.rsplit("-", 1)
    tokens = prompt_of(_length(name, subject.block_size))
    got = _stepper(subject, model, _DTYPES[dtype]).run(tokens, [len(tokens)])
    compare(subject, model, tokens, got, _DTYPES[dtype])


@check("L2/chunks", _EACH)
def test_chunks_and_decodes(subject: Subject, variant: str) -> None:
    """A prompt of several blocks in chunks across the boundaries, with single tokens between them."""
    model, dtype = variant.split("-")
    chunks = _chunks(subject.block_size)
    tokens = prompt_of(sum(chunks), seed=1)
    got = _stepper(subject, model, _DTYPES[dtype]).run(tokens, chunks)
    compare(subject, model, tokens, got, _DTYPES[dtype])


@check("L2/mixed", _EACH)
def test_sequences_of_different_age_in_the_same_steps(subject: Subject, variant: str) -> None:
    """A decode, a chunk and a whole prompt in one batch; each sequence has the logits that it has alone."""
    model, dtype = variant.split("-")
    size = subject.block_size
    stepper = _stepper(subject, model, _DTYPES[dtype])
    plans = [[size, 1, 1], [3, 4, 5], [0, size + 1, 7]]
    streams = [stepper.start(prompt_of(sum(counts), seed=2)) for counts in plans]
    got: list[list[Tensor]] = [[] for _ in plans]
    for moment in range(3):
        work = [(counts[moment], index) for index, counts in enumerate(plans) if counts[moment]]
        work.sort()
        logits = stepper.step([(streams[index], count) for count, index in work])
        for (_, index), part in zip(work, logits, strict=True):
            got[index].append(part)
    for stream, parts in zip(streams, got, strict=True):
        compare(subject, model, tuple(stream.tokens), torch.cat(parts), _DTYPES[dtype])


@check("L2/quantized", [f"{name}-{d}" for name in QUANTIZED for d in ("bf16", "fp16")])
def test_quantized_weights(subject: Subject, variant: str) -> None:
    """Weights of 8 and 4 bits, in a prompt of one block and more, and in chunks.

    Exact is float64 over the dequantized weights. Plain rounds the inputs of products too where the scheme says so
    (int8), or the device asks for it (fp8 with an input format).
    """
    name, dtype = variant.rsplit("-", 1)
    spec = QUANTIZED[name]
    stepper = _stepper(subject, spec.model, _DTYPES[dtype], name)
    rounds = spec.activations == "int8" or _asks_for_rounded_inputs(subject)
    for chunks in ([subject.block_size + 1], _chunks(subject.block_size)):
        tokens = prompt_of(sum(chunks), seed=3)
        got = stepper.run(tokens, chunks)
        exact = quantized_logits(name, tokens, torch.float64, rounded=False)

        def plain(tokens: tuple[int, ...] = tokens) -> Tensor:
            return quantized_logits(name, tokens, torch_dtype(_DTYPES[dtype]), rounded=rounds)

        judge(subject, f"{spec.model} with {name} weights in {_DTYPES[dtype]}", got, exact, plain)


def _asks_for_rounded_inputs(subject: Subject) -> bool:
    rows = (row for top, _ in subject.binder.table.rows() for row in top.flat())
    return any(row.op.name == "linear" and row.verdict.input_format is not None for row in rows)

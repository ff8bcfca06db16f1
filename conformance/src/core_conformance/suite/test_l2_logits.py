"""L2: teacher-forced logits of tiny models against transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.errors import UnsupportedError
from core.spec import DType
from core_conformance.checks import check
from core_conformance.goldens import golden_logits, prompt_of
from core_conformance.records import UnsupportedOutcome
from core_conformance.stepper import Stepper
from core_conformance.subject import Mismatch, Subject
from core_conformance.tolerance import LOGIT_FLOOR, MODEL_RATIO

_DTYPES = {"fp32": DType.FLOAT32, "bf16": DType.BFLOAT16}
_LENGTHS = ("one", "block-minus-1", "block", "block-plus-1")


def _length(name: str, block_size: int) -> int:
    return {"one": 1, "block-minus-1": block_size - 1, "block": block_size, "block-plus-1": block_size + 1}[name]


def _stepper(subject: Subject, model: str, dtype: DType) -> Stepper:
    try:
        return Stepper(subject, model, dtype)
    except UnsupportedError as error:
        raise UnsupportedOutcome(str(error)) from error


def compare(subject: Subject, model: str, tokens: tuple[int, ...], got: Tensor, dtype: DType) -> None:
    """Root mean square error at most MODEL_RATIO times that of transformers in the same type; no outlier."""
    exact = golden_logits(model, tokens, torch.float64)
    plain = (golden_logits(model, tokens, torch_dtype(dtype)) - exact).square().mean().sqrt()
    floor = LOGIT_FLOOR * float(exact.std())
    bound = MODEL_RATIO * float(plain) + floor
    error = float((got - exact).square().mean().sqrt())
    subject.err, subject.bound, subject.ratio = error, bound, error / bound
    if error <= bound:
        return
    worst = (got - exact).abs().amax(-1)
    first = int((worst > 6 * bound).nonzero()[0]) if (worst > 6 * bound).any() else int(worst.argmax())
    raise Mismatch(
        f"logits of {model} in {dtype}: root mean square error {error:.3g}, bound {bound:.3g}; first wrong position "
        f"{first} of {len(tokens)} (block size {subject.block_size}): largest error there {float(worst[first]):.3g}"
    )


@check("L2/logits", [f"{m}-{n}-{d}" for m in ("llama", "gemma3") for n in _LENGTHS for d in _DTYPES])
def test_whole_prompts(subject: Subject, variant: str) -> None:
    """A prompt of one token, and prompts around the block size, each in one step."""
    model, rest = variant.split("-", 1)
    name, dtype = rest.rsplit("-", 1)
    tokens = prompt_of(_length(name, subject.block_size))
    got = _stepper(subject, model, _DTYPES[dtype]).run(tokens, [len(tokens)])
    compare(subject, model, tokens, got, _DTYPES[dtype])


@check("L2/chunks", [f"{m}-{d}" for m in ("llama", "gemma3") for d in _DTYPES])
def test_chunks_and_decodes(subject: Subject, variant: str) -> None:
    """A prompt of two blocks and a bit, in chunks across the boundaries, ending in single tokens."""
    model, dtype = variant.split("-")
    size = subject.block_size
    chunks = [size - 3, 2, 5, size - 4, 1, 1, 1]
    tokens = prompt_of(sum(chunks), seed=1)
    got = _stepper(subject, model, _DTYPES[dtype]).run(tokens, chunks)
    compare(subject, model, tokens, got, _DTYPES[dtype])


@check("L2/mixed", [f"{m}-{d}" for m in ("llama", "gemma3") for d in _DTYPES])
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

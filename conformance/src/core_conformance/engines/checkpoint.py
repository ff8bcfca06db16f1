"""Checks of a real checkpoint on the backend under test: log-probabilities and greedy tokens against transformers.

They are no part of the must-pass lists, which hold for the suite's own models; their ids are L2/checkpoint/... and
L3/checkpoint/... with the name of the folder. What is allowed follows from what transformers in the same type makes of
the same tokens, not from a fixed number: real models have logits of any size.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from core.backend import torch_dtype
from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.engine.build import build_engine
from core.errors import CoreError, UnsupportedError
from core.exec.build import build_runner
from core.exec.model_runner import ModelRunner
from core.loader.checkpoint import open_checkpoint
from core.spec import DType
from core_conformance.engines.rig import Rig, tokens_of
from core_conformance.records import Findings, Outcome, Record, UnsupportedOutcome, level_of
from core_conformance.subject import Mismatch
from core_conformance.target import Target
from core_conformance.tolerance import AMBIGUOUS_SHARE, LOGIT_DELTA, LOGIT_FLOOR, MODEL_RATIO

__all__ = ["Checkpoint", "checkpoint_ids", "run_checkpoint"]

_NUM_CANDIDATES = 10
_NUM_GREEDY = 16
_NUM_PROMPT = 96
_MAX_MODEL_LEN = 128
_TEXT = (
    "The river rises in the hills to the north, where the rain falls on chalk and comes out again, cold and clear, "
    "a month later. By the time it reaches the town it has turned three mills, watered the meadows below the church, "
    "and given its name to two villages that no longer stand on its banks. In the spring of that year the water came "
    "higher than anyone could remember, and the old bridge, which had been built for carts, did not survive the night."
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model that is no part of the suite.

    Args:
        folder: With config.json and weights, as transformers reads it.
        dtype: Of activations and cache: "float32", "bfloat16" or "float16".
    """

    folder: Path
    dtype: str

    @property
    def name(self) -> str:
        """The folder's name, in characters that an id may have."""
        return re.sub(r"[^A-Za-z0-9._]+", "_", self.folder.resolve().name)


@dataclass(frozen=True)
class _Golden:
    """What transformers says: in the type of the run, and in a wider one, which counts as exact."""

    exact: Any
    plain: Any
    prompt: tuple[int, ...]

    def logits(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(exact, plain), each [len(tokens), vocabulary] float64."""
        ids = torch.tensor([list(tokens)])
        return self.exact(ids).logits[0].double(), self.plain(ids).logits[0].double()

    def greedy(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The greedy continuation, every step from the whole sequence."""
        tokens = list(prompt)
        for _ in range(_NUM_GREEDY):
            tokens.append(int(self.exact(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tuple(tokens[len(prompt) :])


def checkpoint_ids(checkpoint: Checkpoint, levels: Sequence[str]) -> list[str]:
    """Ids of its checks at these levels."""
    ids = [name.format(checkpoint.name) for name in _CHECKS]
    return [check_id for check_id in ids if level_of(check_id) in levels]


def run_checkpoint(
    target: Target,
    checkpoint: Checkpoint,
    levels: Sequence[str],
    *,
    select: Callable[[str], bool] = lambda check_id: True,
    begin: Callable[[str], None] = lambda check_id: None,
) -> Iterator[Record]:
    """One record for each id of `checkpoint_ids`, as it is made.

    Args:
        target: The backend.
        checkpoint: The model.
        levels: "L0" to "L4"; it has checks at L2 and L3.
        select: Whether to run an id; the others become NOT_RUN.
        begin: Called with each id before it runs.
    """
    for name, check in _CHECKS.items():
        check_id = name.format(checkpoint.name)
        if level_of(check_id) not in levels:
            continue
        if not select(check_id):
            yield Record(id=check_id, outcome=Outcome.NOT_RUN, reason="not selected", mode=target.mode)
            continue
        begin(check_id)
        findings, start = Findings(model=checkpoint.name, dtype=checkpoint.dtype), time.perf_counter()
        outcome, reason = _outcome(check, target, checkpoint, findings)
        facts = {field.name: getattr(findings, field.name) for field in fields(findings)}
        seconds = time.perf_counter() - start
        yield Record(id=check_id, outcome=outcome, reason=reason, seconds=seconds, mode=target.mode, **facts)


def _outcome(check: _Check, target: Target, checkpoint: Checkpoint, findings: Findings) -> tuple[Outcome, str]:
    try:
        golden = _golden(checkpoint)
    except Exception as error:
        return Outcome.ERROR, f"transformers cannot load {checkpoint.folder}: {type(error).__name__}: {error}"
    try:
        with torch.inference_mode():
            check(target, checkpoint, golden, findings)
    except UnsupportedOutcome as error:
        return Outcome.UNSUPPORTED, str(error)
    except (Mismatch, CoreError) as error:
        return Outcome.FAIL, str(error)
    except Exception as error:
        return Outcome.FAIL, f"{type(error).__name__}: {error}"
    return Outcome.PASS, ""


@functools.cache
def _golden(checkpoint: Checkpoint) -> _Golden:
    # Its stream may be pytest's, which is closed by now.
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    wide = torch.float64 if checkpoint.dtype == "float32" else torch.float32
    exact, plain = (_load(checkpoint.folder, dtype) for dtype in (wide, torch_dtype(DType(checkpoint.dtype))))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.folder)
    return _Golden(exact, plain, tuple(tokenizer(_TEXT)["input_ids"][:_NUM_PROMPT]))


def _load(folder: Path, dtype: torch.dtype) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


@contextmanager
def _engine(target: Target, checkpoint: Checkpoint, findings: Findings, **scheduler: Any) -> Iterator[Rig]:
    made: list[ModelRunner] = []

    def factory(config: EngineConfig) -> ModelRunner:
        with open_checkpoint(checkpoint.folder) as opened:
            made.append(build_runner(config, opened, target.open(), target.info, target.device))
        return made[-1]

    config = EngineConfig(
        model=str(checkpoint.folder),
        dtype=checkpoint.dtype,
        max_model_len=_MAX_MODEL_LEN,
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 256, **scheduler}),
        cache=CacheConfig(num_blocks=_MAX_MODEL_LEN, enable_prefix_caching=False),
    )
    try:
        built = build_engine(config, runner_factory=factory)
    except UnsupportedError as error:
        raise UnsupportedOutcome(str(error)) from error
    table = made[0].table
    findings.op_table, findings.kinds = table.hash, {row.op.name: str(row.kind) for row, _ in table.rows()}
    try:
        yield Rig(built, made[0], checkpoint.name)
    finally:
        built.close()


def _log_probabilities(
    target: Target, checkpoint: Checkpoint, golden: _Golden, findings: Findings, **scheduler: Any
) -> None:
    """Root mean square error over the likeliest tokens at each position: at most MODEL_RATIO times that of plain."""
    prompt = golden.prompt
    with _engine(target, checkpoint, findings, **scheduler) as rig:
        request = rig.start(prompt, prompt_logprobs=_NUM_CANDIDATES, max_tokens=1)
        told = next(news.prompt_logprobs for news in rig.finish()[request] if news.prompt_logprobs is not None)
    exact, plain = (logits.log_softmax(-1) for logits in golden.logits(prompt))
    errors, others, wanted, places = [], [], [], []
    for position, entry in enumerate(told):
        if entry is None:
            continue
        row = exact[position - 1]
        for token, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            errors.append(logprob - float(row[token]))
            others.append(float(plain[position - 1, token] - row[token]))
            wanted.append(float(row[token]))
            places.append(position)
    error, other = (torch.tensor(values, dtype=torch.float64).square().mean().sqrt() for values in (errors, others))
    floor = LOGIT_FLOOR * float(torch.tensor(wanted, dtype=torch.float64).std())
    findings.err, findings.bound = float(error), MODEL_RATIO * float(other) + floor
    findings.ratio = findings.err / findings.bound
    findings.notes["positions"] = len(prompt) - 1
    if not findings.err <= findings.bound:  # a NaN is wrong too
        worst = max(range(len(errors)), key=lambda at: abs(errors[at]))
        raise Mismatch(
            f"log-probabilities of {checkpoint.name} in {checkpoint.dtype}: root mean square error {findings.err:.3g}, "
            f"bound {findings.bound:.3g}; the largest, {errors[worst]:.3g}, is at position {places[worst]} of "
            f"{len(prompt)}"
        )


def _greedy(target: Target, checkpoint: Checkpoint, golden: _Golden, findings: Findings, **scheduler: Any) -> None:
    """Prompts of several lengths together. A token may differ where the two are nearer than plain itself is exact."""
    with _engine(target, checkpoint, findings, **scheduler) as rig:
        size, text = rig.block_size, golden.prompt
        prompts = [text[: max(length, 1)] for length in (1, size - 1, size + 1, 2 * size + 3)]
        answers = rig.run(prompts, max_tokens=_NUM_GREEDY)
        num_ambiguous = num_plain = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = golden.greedy(prompt)
            exact, plain = (logits[len(prompt) - 1 : -1] for logits in golden.logits((*prompt, *expected)))
            ids = torch.tensor(expected)
            num_plain += int((plain.argmax(-1) != ids).sum())
            top = exact.topk(2).indices
            delta = max(LOGIT_DELTA, MODEL_RATIO * float((plain - exact).gather(1, top).abs().max()))
            num_ambiguous += _follow(rig, prompt, answer, expected, exact, delta)
    total = _NUM_GREEDY * len(prompts)
    findings.notes |= {"tokens": total, "ambiguous": num_ambiguous, "ambiguous_in_transformers": num_plain}
    most = max(1.0, AMBIGUOUS_SHARE * total + MODEL_RATIO * num_plain)
    if num_ambiguous > most:
        raise Mismatch(
            f"{num_ambiguous} of {total} greedy tokens of {checkpoint.name} in {checkpoint.dtype} differ where two are "
            f"about as likely; at most {most:.0f} may"
        )


def _follow(
    rig: Rig,
    prompt: tuple[int, ...],
    answer: tuple[int, ...],
    expected: tuple[int, ...],
    exact: Tensor,
    delta: float,
) -> int:
    """Ambiguous tokens of an answer; behind each the expected one is forced and the run goes on.

    Raises:
        Mismatch: a token differs that is not ambiguous.
    """
    done = num_ambiguous = 0
    while done < len(expected):
        rest = expected[done:]
        wrong = next((at for at, token in enumerate(rest) if answer[at : at + 1] != (token,)), None)
        if wrong is None:
            return num_ambiguous
        at = done + wrong
        got = answer[wrong] if wrong < len(answer) else -1
        gap = float(exact[at, expected[at]] - exact[at, got]) if got >= 0 else float("inf")
        if gap > 2 * delta:
            raise Mismatch(
                f"greedy tokens of {rig.model}: token {at} after a prompt of {len(prompt)} is {got}, expected "
                f"{expected[at]}, which is better by {gap:.3g}; at most {2 * delta:.3g} would be ambiguous"
            )
        num_ambiguous, done = num_ambiguous + 1, at + 1
        if done < len(expected):
            request = rig.start((*prompt, *expected[:done]), max_tokens=len(expected) - done)
            answer = tokens_of(rig.finish()[request])
    return num_ambiguous


_Check = Callable[[Target, Checkpoint, _Golden, Findings], None]
_CHECKS: dict[str, _Check] = {
    "L2/checkpoint/{}-whole": _log_probabilities,
    "L2/checkpoint/{}-chunks": functools.partial(_log_probabilities, max_num_batched_tokens=19),
    "L3/checkpoint/{}-greedy": _greedy,
    "L3/checkpoint/{}-chunks": functools.partial(_greedy, max_num_batched_tokens=7),
    "L3/checkpoint/{}-preemption": functools.partial(_greedy, force_preemption=True),
}

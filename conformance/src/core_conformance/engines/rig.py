"""An engine over the backend under test, stepped by hand, with the books checked after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.engine.build import build_engine
from core.engine.engine import Engine
from core.errors import UnsupportedError
from core.exec.build import build_runner
from core.exec.drafts import Drafter
from core.exec.model_runner import ModelRunner
from core.exec.token_masks import TokenMasks
from core.loader.checkpoint import open_checkpoint
from core.outputs import EngineOutput
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core_conformance.engines.goldens import Golden, greedy, prompt_of
from core_conformance.engines.models import NUM_TOKENS, model_folder
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Mismatch, Subject
from core_conformance.tolerance import AMBIGUOUS_SHARE, LOGIT_DELTA

__all__ = ["NUM_SPEC_TOKENS", "Comparison", "Rig", "compare_all", "engine", "golden_set", "tokens_of"]

NUM_SPEC_TOKENS = 3
"""Most drafts of a request in a step, where there is a drafter."""
_STEP_LIMIT = 5000


class Rig:
    """An engine with its runner, and requests run to their end.

    Args:
        engine: The engine.
        runner: Its runner.
        model: Which of the suite's models.
    """

    def __init__(self, engine: Engine, runner: ModelRunner, model: str) -> None:
        self.engine, self.runner, self.model = engine, runner, model
        self.block_size = runner.block_size
        self._num_requests = 0
        self._num_steps = 0

    def start(self, prompt: Sequence[int], **params: Any) -> str:
        """Queues a request, greedy and deaf to end tokens unless told otherwise, and returns its id."""
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        salt = params.pop("cache_salt", None)
        params = {"temperature": 0.0, "ignore_eos": True, **params}
        source = EngineRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**params),
            cache_salt=salt,
        )
        self.engine.add_requests([source])
        return request_id

    def step(self) -> list[EngineOutput]:
        """One step; afterwards the books must agree."""
        self._num_steps += 1
        if self._num_steps > _STEP_LIMIT:
            raise Mismatch(f"the engine does not come to an end within {_STEP_LIMIT} steps")
        outputs = self.engine.step()
        self._check_books()
        for output in outputs:
            if output.error:
                raise Mismatch(f"{output.request_id} ended with an error: {output.error}")
        return outputs

    def finish(self, between: Callable[[int], None] = lambda step: None) -> dict[str, list[EngineOutput]]:
        """Steps until nothing is left; afterwards no block may be held.

        Args:
            between: Called before each step with its number, from 0.
        """
        news: dict[str, list[EngineOutput]] = {}
        number = 0
        while self.engine.has_work():
            between(number)
            number += 1
            for output in self.step():
                news.setdefault(output.request_id, []).append(output)
        self.must_be_empty()
        return news

    def must_be_empty(self) -> None:
        """Asserts that no block is held when no request lives."""
        stats = self.engine.stats()
        if stats.kv_cache_usage != 0.0:
            raise Mismatch(
                f"{stats.num_blocks - stats.num_free_blocks} of {stats.num_blocks} KV blocks are still held when no "
                "request lives: they leaked"
            )

    def run(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[tuple[int, ...]]:
        """Output tokens of each prompt, run together."""
        ids = [self.start(prompt, **params) for prompt in prompts]
        news = self.finish()
        return [tokens_of(news[request_id]) for request_id in ids]

    def _check_books(self) -> None:
        try:
            self.engine.check_integrity()
        except AssertionError as error:
            raise Mismatch(f"check_integrity() after step {self._num_steps}: {error}") from error


def tokens_of(news: Sequence[EngineOutput]) -> tuple[int, ...]:
    """All tokens of a request."""
    return tuple(token for output in news for token in output.new_token_ids)


@contextmanager
def engine(
    subject: Subject,
    model: str,
    *,
    dtype: str = "float32",
    cache: dict[str, Any] | None = None,
    drafter: Drafter | None = None,
    token_masks: TokenMasks | None = None,
    **scheduler: Any,
) -> Iterator[Rig]:
    """An engine over a fresh instance of the backend; closed at the end.

    Args:
        subject: The backend.
        model: Which of the suite's models.
        dtype: Of activations and cache.
        cache: Fields of CacheConfig.
        drafter: Proposes up to NUM_SPEC_TOKENS tokens a request and step.
        token_masks: Constrains requests.
        scheduler: Fields of SchedulerConfig, and `deterministic`.

    Raises:
        UnsupportedOutcome: the backend refuses one of the model's operations.
    """
    made: list[ModelRunner] = []
    subject.model, subject.dtype = model, dtype
    deterministic = bool(scheduler.pop("deterministic", False))
    if drafter is not None:
        scheduler["num_spec_tokens"] = NUM_SPEC_TOKENS

    def factory(config: EngineConfig) -> ModelRunner:
        with open_checkpoint(model_folder(model)) as checkpoint:
            target = subject.target
            backend = target.open()
            runner = build_runner(
                config,
                checkpoint,
                backend,
                target.info,
                target.device,
                num_tokenizer_ids=NUM_TOKENS,
                drafter=drafter,
                token_masks=token_masks,
            )
        made.append(runner)
        return runner

    config = EngineConfig(
        model=model,
        dtype=dtype,
        deterministic=deterministic,
        scheduler=SchedulerConfig(**{"max_num_seqs": 16, "max_num_batched_tokens": 1024, **scheduler}),
        cache=CacheConfig(**{"num_blocks": 96, **(cache or {})}),
    )
    try:
        built = build_engine(config, runner_factory=factory)
    except UnsupportedError as error:
        raise UnsupportedOutcome(str(error)) from error
    for row, _ in made[0].table.rows():
        subject.binder.table.add(row)
    try:
        yield Rig(built, made[0], model)
    finally:
        built.close()


@dataclass
class Comparison:
    """Greedy outputs against goldens; ambiguous tokens are forced to the golden's and counted.

    Args:
        model: Which of the suite's models.
        exact: Whether no token may be ambiguous (the copy model).
    """

    model: str
    exact: bool = False
    num_tokens: int = 0
    num_ambiguous: int = 0

    def check(self, rig: Rig, golden: Golden, tokens: tuple[int, ...], what: str) -> None:
        """Asserts that `tokens` are the golden's; behind an ambiguous one the golden is forced and the run goes on.

        Raises:
            Mismatch: naming request, position, tokens and the golden's gap.
        """
        self.num_tokens += len(golden.tokens)
        done = 0
        while True:
            wrong = _first_difference(golden.tokens[done:], tokens)
            if wrong is None:
                return
            at = done + wrong
            gap = golden.gaps[at] if at < len(golden.gaps) else float("inf")
            if self.exact or gap > 2 * LOGIT_DELTA or wrong >= len(tokens):
                self._fail(golden, tokens, at, wrong, gap, what)
            self.num_ambiguous += 1
            done = at + 1
            if done == len(golden.tokens):
                return
            forced = [*golden.prompt, *golden.tokens[:done]]
            [tokens] = rig.run([forced], max_tokens=len(golden.tokens) - done)

    def close(self, subject: Subject) -> None:
        """Notes the counts and asserts that few tokens were ambiguous."""
        subject.notes["tokens"] = subject.notes.get("tokens", 0) + self.num_tokens
        subject.notes["ambiguous"] = subject.notes.get("ambiguous", 0) + self.num_ambiguous
        if self.num_ambiguous > max(1, AMBIGUOUS_SHARE * self.num_tokens):
            raise Mismatch(
                f"{self.num_ambiguous} of {self.num_tokens} tokens of {self.model} differ where the golden's gap is "
                f"small; at most {AMBIGUOUS_SHARE:.0%} may"
            )

    def _fail(self, golden: Golden, tokens: tuple[int, ...], at: int, wrong: int, gap: float, what: str) -> None:
        got = tokens[wrong] if wrong < len(tokens) else "nothing"
        expected = golden.tokens[at] if at < len(golden.tokens) else "nothing"
        raise Mismatch(
            f"greedy tokens of {self.model} ({what}): token {at} after a prompt of {len(golden.prompt)} is {got}, "
            f"expected {expected}; the golden's gap is {gap:.3g}, at most {2 * LOGIT_DELTA:.3g} would be ambiguous"
        )


def _first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def golden_set(model: str, block_size: int, count: int = 10) -> list[Golden]:
    """Goldens of prompts around the block size; those of the copy model are longer than its distance."""
    lengths = [1, block_size - 1, block_size + 1, 2 * block_size + 3]
    if model == "copy":
        lengths = [length + 40 for length in lengths]
    return [greedy(model, prompt_of(length, seed=3), count) for length in lengths]


def compare_all(
    subject: Subject, rig: Rig, what: str, *, count: int = 10, goldens: Sequence[Golden] | None = None
) -> list[list[EngineOutput]]:
    """Runs the golden prompts together, compares every token, and gives back the news of each.

    Args:
        subject: Keeps the counts.
        rig: The engine.
        what: Of the schedule, for messages.
        count: Tokens of each prompt.
        goldens: In place of `golden_set`; their tokens are `count` each.
    """
    chosen = golden_set(rig.model, rig.block_size, count) if goldens is None else goldens
    comparison = Comparison(rig.model, exact=rig.model == "copy")
    ids = [rig.start(golden.prompt, max_tokens=len(golden.tokens)) for golden in chosen]
    news = rig.finish()
    for golden, request_id in zip(chosen, ids, strict=True):
        comparison.check(rig, golden, tokens_of(news[request_id]), what)
    comparison.close(subject)
    return [news[request_id] for request_id in ids]

"""L3: how requests end, and what is counted: stop strings and ids, ends of sequences, choices, usage."""

from __future__ import annotations

from typing import Any

from core.outputs import CompletionOutput, EngineOutput, FinishReason
from core.text.tokenizer import load_tokenizer
from core_conformance.checks import check
from core_conformance.engines.goldens import Golden, clear, greedy, prompt_of, prompt_that_says
from core_conformance.engines.models import model_folder
from core_conformance.engines.rig import tokens_of
from core_conformance.engines.schedules import SCHEDULES, scheduled
from core_conformance.engines.text_rig import TextRig
from core_conformance.subject import Mismatch, Subject

_TEXT = "the quick brown fox jumps over"
_COUNT = 24


@check("L3/stop-strings", SCHEDULES.keys())
def test_stop_strings(subject: Subject, variant: str) -> None:
    """Text ends before the string, or behind it where asked for; no token behind the one that completes it is told."""
    spelled = load_tokenizer(model_folder("copy")).encode(_TEXT, add_special_tokens=False)
    golden = greedy("copy", prompt_that_says(spelled), _COUNT)
    assert golden.tokens == tuple(spelled[:_COUNT]), "the copy model does not say what it was made to say"
    with scheduled(subject, "copy", variant, [golden]) as rig:
        text = TextRig(rig)
        common = {"max_tokens": _COUNT}
        outputs = text.run(
            [
                (golden.prompt, {"stop": ("brown",), **common}),
                (golden.prompt, {"stop": ("brown",), "include_stop_str_in_output": True, **common}),
                (golden.prompt, {"stop": ("o", "quick b"), **common}),
                (golden.prompt, {"stop": ("brown cow", "jumpy"), **common}),  # "jump" is held back until the end
                (golden.prompt, {"stop": ("t",), "min_tokens": 0, **common}),
            ]
        )
    expected = [
        ("the quick ", 15, FinishReason.STOP, "brown"),
        ("the quick brown", 15, FinishReason.STOP, "brown"),
        ("the ", 11, FinishReason.STOP, "quick b"),
        (_TEXT[:_COUNT], _COUNT, FinishReason.LENGTH, None),
        ("", 1, FinishReason.STOP, "t"),
    ]
    for index, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        [choice] = output.outputs
        got = (choice.text, len(choice.token_ids), choice.finish_reason, choice.stop_reason)
        if got != wanted:
            raise Mismatch(f"stop strings, {variant}, request {index}: got {got}, expected {wanted}")


@check("L3/stop-ids", [f"{m}-{s}" for m in ("llama", "copy") for s in SCHEDULES])
def test_stop_ids_and_ends_of_sequences(subject: Subject, variant: str) -> None:
    """A stop id, an end of sequence, the same ignored, and a stop id while ends are ignored."""
    model, schedule = variant.split("-", 1)
    golden = clear(model, 42, 9)
    place = next(i for i in (4, 3, 5, 2) if golden.tokens.index(golden.tokens[i]) == i)
    end, whole = golden.tokens[place], len(golden.tokens)
    cases: list[tuple[dict[str, Any], int, FinishReason, int | None]] = [
        ({"stop_token_ids": (end,), "ignore_eos": False}, place + 1, FinishReason.STOP, end),
        ({"eos_token_ids": (258, end), "ignore_eos": False}, place + 1, FinishReason.STOP, None),
        ({"eos_token_ids": (258, end), "ignore_eos": True}, whole, FinishReason.LENGTH, None),
        ({"eos_token_ids": (258,), "stop_token_ids": (end,), "ignore_eos": True}, place + 1, FinishReason.STOP, end),
        ({"max_tokens": place}, place, FinishReason.LENGTH, None),
    ]
    with scheduled(subject, model, schedule, [golden]) as rig:
        ids = [rig.start(golden.prompt, **{"max_tokens": whole, **params}) for params, *_ in cases]
        news = rig.finish()
    for request_id, (params, length, reason, stop) in zip(ids, cases, strict=True):
        last = news[request_id][-1]
        got = (tokens_of(news[request_id]), last.finish_reason, last.stop_reason)
        if got != (golden.tokens[:length], reason, stop):
            raise Mismatch(
                f"{params}, {schedule}: got {got}, expected {length} tokens {golden.tokens[:length]}, {reason}, {stop}"
            )


@check("L3/usage", SCHEDULES.keys())
def test_counts(subject: Subject, variant: str) -> None:
    """Tokens of prompt, output and cache, and totals, for requests of every length, none included."""
    size = subject.block_size
    goldens = [clear("llama", length, 6) for length in (1, size, size + 1, 2 * size + 1)]
    num_prompt, lengths = sum(len(golden.prompt) for golden in goldens), (0, 1, 2, 6)
    with scheduled(subject, "llama", variant, goldens) as rig:
        for what in ("cold", "warm"):
            before = rig.engine.stats()
            ids = [rig.start(g.prompt, max_tokens=n) for g, n in zip(goldens, lengths, strict=True)]
            news = rig.finish()
            stats = rig.engine.stats()
            found = 0
            for golden, length, request_id in zip(goldens, lengths, ids, strict=True):
                _check_outputs(news[request_id], golden, length, f"{variant}, {what}")
                found += _check_cached(news[request_id], golden, size, variant, what)
            queries = stats.prefix_cache_queries - before.prefix_cache_queries
            hits = stats.prefix_cache_hits - before.prefix_cache_hits
            if (queries, hits) != (num_prompt, found):
                raise Mismatch(
                    f"usage, {variant}, {what}: {hits} of {queries} prompt tokens are counted as cached in all, the "
                    f"requests were told of {found} of {num_prompt}"
                )
            if (stats.num_requests_running, stats.num_requests_waiting) != (0, 0):
                raise Mismatch(f"usage, {variant}: requests are counted when none lives")


def _check_outputs(outputs: list[EngineOutput], golden: Golden, length: int, what: str) -> None:
    tokens = tokens_of(outputs)
    reasons = [output.finish_reason for output in outputs]
    if tokens != golden.tokens[:length] or reasons != [None] * (len(outputs) - 1) + [FinishReason.LENGTH]:
        raise Mismatch(f"usage, {what}: max_tokens={length} gives {len(tokens)} tokens {tokens}, ends {reasons}")


def _check_cached(outputs: list[EngineOutput], golden: Golden, size: int, schedule: str, what: str) -> int:
    """Cached tokens, told once: all full blocks before the last token; fewer where steps were lost to preemption."""
    options = SCHEDULES[schedule]
    caching = options.get("cache", {}).get("enable_prefix_caching", True)
    most = (len(golden.prompt) - 1) // size * size if what == "warm" and caching else 0
    told = [output.num_cached_tokens for output in outputs]
    fewer = options.get("force_preemption", False) and told[0] < most and told[0] % size == 0
    if (told[0] != most and not fewer) or any(told[1:]):
        raise Mismatch(
            f"usage, {schedule}, {what}: {told} tokens of a prompt of {len(golden.prompt)} are told as cached, "
            f"expected {most} once"
        )
    return told[0]


@check("L3/choices", ["default", "recompute", "chunks"])
def test_choices_of_one_request(subject: Subject, variant: str) -> None:
    """Of n choices with one seed each is another answer, and the one that its own seed gives alone."""
    prompt, common = prompt_of(21, seed=6), {"temperature": 0.9, "max_tokens": 10}
    with scheduled(subject, "llama", variant) as rig:
        text = TextRig(rig)
        [several] = text.run([(prompt, {"n": 4, "seed": 100, **common})])
        alone = text.run([(prompt, {"seed": 100 + index, **common}) for index in range(4)])
        free = text.run([(prompt, {"n": 3, **common}), (prompt, common)])
    choices = [_said(choice) for choice in several.outputs]
    if choices != [_said(output.outputs[0]) for output in alone]:
        raise Mismatch(f"choices of seed 100: {choices}, alone seeds 100 to 103 give something else")
    others = [_said(choice) for output in free for choice in output.outputs]
    if len(set(choices)) != 4 or len(set(others)) != 4:
        raise Mismatch(f"choices repeat each other: {choices} with a seed, {others} without")
    if several.prompt_token_ids != list(prompt) or [choice.index for choice in several.outputs] != [0, 1, 2, 3]:
        raise Mismatch("a request with n choices lost its prompt or the order of its choices")


def _said(choice: CompletionOutput) -> tuple[int, ...]:
    return tuple(choice.token_ids)

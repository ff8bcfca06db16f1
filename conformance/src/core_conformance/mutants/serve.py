"""Servers with one bug each: `python -m core_conformance.mutants.serve NAME serve MODEL ...`.

A server is a process of its own, so that its bug is planted there, by name, before `core serve` runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from core_conformance.mutants import wrong_answers as answers
from core_conformance.mutants import wrong_service as service

__all__ = ["BUGS", "ServedBug", "main"]


@dataclass(frozen=True)
class ServedBug:
    """A bug of a server.

    Args:
        first: Head of the ids of which one must find it, without the level.
        plant: Context in which the server is wrong.
        also: Heads of further ids that the kill matrix runs.
    """

    first: str
    plant: Callable[[], AbstractContextManager[Any]]
    also: tuple[str, ...] = ()


BUGS: dict[str, ServedBug] = {
    "served usage one token too many": ServedBug("wire/completions", answers.usage_off_by_one, ("wire/chat",)),
    "cached tokens never told": ServedBug("wire/cached-tokens", answers.cached_never_told),
    "stream without its final usage": ServedBug("wire/stream-usage", answers.no_final_usage),
    "stream without [DONE]": ServedBug("wire/chat-plain", answers.no_done, ("wire/chat",)),
    "finish_reason always stop": ServedBug("wire/chat-plain", lambda: answers.delta(answers.always_stop)),
    "stop_reason not told": ServedBug("wire/chat-stop", lambda: answers.delta(answers.no_stop_reason)),
    "every choice is the first": ServedBug("wire/completions-choices", lambda: answers.delta(answers.first_choice)),
    "outputs of prompts collide": ServedBug("wire/completions-prompts", answers.prompts_collide),
    "served tokens counted twice": ServedBug("wire/metrics", service.counted_twice),
    "model told differently each time": ServedBug("wire/models", lambda: answers.model_told(answers.changes_each_time)),
    "token in front of a tokenized text": ServedBug("wire/tokenize", answers.special_token_counted),
    "X-Request-Id lost": ServedBug("wire/small-routes", answers.label_lost),
    "any model's name is taken": ServedBug("errors/request-unknown-model", answers.any_model),
    "errors do not name the field": ServedBug("errors/request", answers.no_param, ("errors/fields",)),
    "status before the stream can begin": ServedBug("errors/in-a-stream", answers.status_first),
    "bodies of any size": ServedBug("errors/too-large", service.bodies_of_any_size),
    "refused requests stay counted": ServedBug(
        "errors/harmless", service.refused_requests_counted, ("overload/burst-of-leavers",)
    ),
    "client that leaves is not noticed": ServedBug("cancel", service.leavers_unnoticed),
    "streams mixed up when several run": ServedBug("streams", service.streams_mixed_up, ("overload",)),
    "descriptor kept for each request": ServedBug("soak", service.descriptor_kept),
    "queue without an end": ServedBug("overload/queue-full", service.queue_without_end),
    "longer context told than there is": ServedBug(
        "overload/never-fits", lambda: answers.model_told(answers.longer_than_it_is)
    ),
    "loading server told as dead": ServedBug("life/loading", service.loading_is_dead),
    "no drain at SIGTERM": ServedBug("life/drain", service.no_drain),
    "pieces of text lost": ServedBug("streams", lambda: answers.delta(answers.a_letter_lost), ("accuracy",)),
    "streams mixed up when few run": ServedBug("overload/small-pool", service.few_streams_mixed_up),
    "stop strings forgotten": ServedBug("length", service.stops_forgotten),
    "each token held back": ServedBug("performance/decode", service.tokens_held_back),
    "long prompts held back": ServedBug("performance/prefill", service.long_prompts_held_back),
    "answers end early": ServedBug("wire/completions-plain", service.ends_early, ("length",)),
}
"""By name."""


def main() -> None:
    """`core` with the bug that the first argument names."""
    from core.cli import main as core

    name = sys.argv.pop(1)
    with BUGS[name].plant():
        core()


if __name__ == "__main__":
    main()

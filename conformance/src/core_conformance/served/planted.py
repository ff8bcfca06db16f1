"""Servers with one bug each, to show that L4 sees it.

`python -m core_conformance.served.planted run BACKEND [WORDS]` serves every one and runs the check that must fail; exit
code 1 where it passes. `python -m core_conformance.served.planted BUG serve ...` is `core serve ...` with the bug.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["BUGS", "Bug", "main", "prove"]


@dataclass(frozen=True)
class Bug:
    """A server that must not pass.

    Args:
        check_id: What must fail on it.
        plant: Puts the bug into this process, before the server is started.
    """

    check_id: str
    plant: Callable[[], None]


def _counts_too_many() -> None:
    from core.serve.choices import Usage

    honest = Usage.json

    def json(self: Usage) -> dict[str, Any]:
        shown = honest(self)
        return {**shown, "completion_tokens": shown["completion_tokens"] + 1, "total_tokens": shown["total_tokens"] + 1}

    Usage.json = json  # type: ignore[method-assign]


def _ignores_leavers() -> None:
    from core.serve import chat, completions, stream

    async def unless_disconnected(work: Coroutine[Any, Any, Any], receive: Any) -> Any:
        return await work

    for module in (chat, completions, stream):
        module.unless_disconnected = unless_disconnected  # type: ignore[attr-defined]


def _forgets_headers() -> None:
    from core.serve.errors import ApiError

    honest = ApiError.__init__

    def init(self: ApiError, status: int, message: str, **fields: Any) -> None:
        honest(self, status, message, **{**fields, "headers": None})

    ApiError.__init__ = init  # type: ignore[method-assign]


def _names_no_field() -> None:
    from core.serve import errors

    honest = errors.error_body
    errors.error_body = lambda message, kind, param, code: honest(message, kind, None, code)


def _on_each_request(do: Callable[[], object]) -> None:
    from core.serve.state import RequestLabels

    honest = RequestLabels.__init__

    def init(self: RequestLabels, prefix: str, label: str | None) -> None:
        do()
        honest(self, prefix, label)

    RequestLabels.__init__ = init  # type: ignore[method-assign]


_KEPT: list[object] = []


def _leaks_descriptors() -> None:
    _on_each_request(lambda: _KEPT.append(os.dup(0)))


def _leaks_memory() -> None:
    _on_each_request(lambda: _KEPT.append(b"x" * (1 << 20)))


def _leaks_threads() -> None:
    never = threading.Event()
    _on_each_request(lambda: threading.Thread(target=never.wait, daemon=True).start())


def _around_generate(change: Callable[[Any, Any, Any], AsyncGenerator[Any, None]]) -> None:
    """`change(outputs, state, params)` in place of the outputs of each prompt."""
    from core.serve.state import ServerState

    honest = ServerState.generate

    async def generate(self: ServerState, prompt: Any, params: Any, *rest: Any) -> AsyncGenerator[Any, None]:
        source = change(honest(self, prompt, params, *rest), self, params)
        try:
            async for output in source:
                yield output
        finally:
            await source.aclose()

    ServerState.generate = generate  # type: ignore[method-assign, assignment]


def _loses_text_under_load() -> None:
    async def change(outputs: Any, state: Any, params: Any) -> AsyncGenerator[Any, None]:
        try:
            async for output in outputs:
                if state.num_requests > 16 and output.outputs:
                    output.outputs[0].text = output.outputs[0].text[:-1]
                yield output
        finally:
            await outputs.aclose()

    _around_generate(change)


def _stops_early() -> None:
    from core.serve import params

    honest = params._build

    def build(body: Any, **limits: Any) -> Any:
        most = limits.get("max_tokens")
        return honest(body, **{**limits, "max_tokens": most if most is None else max(1, most * 3 // 5)})

    params._build = build


def _reports_the_best_logprob() -> None:
    from core.serve.logprobs import CompletionLogprobs

    honest = CompletionLogprobs.add

    def add(self: CompletionLogprobs, token_id: int, entry: Any, **options: Any) -> None:
        honest(self, token_id, entry, **options)
        if entry is not None:
            self._token_logprobs[-1] = max(entry.logprobs)

    CompletionLogprobs.add = add  # type: ignore[method-assign]


def _does_not_drain() -> None:
    from core.serve import server

    async def drain(*args: Any) -> None:
        return None

    server._drain = drain  # type: ignore[assignment]


BUGS: dict[str, Bug] = {
    "counts-too-many": Bug("L4/wire/completions-plain", _counts_too_many),
    "ignores-leavers": Bug("L4/cancel/stream-completions", _ignores_leavers),
    "forgets-headers": Bug("L4/overload/queue-full", _forgets_headers),
    "names-no-field": Bug("L4/errors/fields-completions", _names_no_field),
    "leaks-descriptors": Bug("L4/soak", _leaks_descriptors),
    "leaks-memory": Bug("L4/soak", _leaks_memory),
    "leaks-threads": Bug("L4/soak", _leaks_threads),
    "loses-text-under-load": Bug("L4/streams/completions", _loses_text_under_load),
    "stops-early": Bug("L4/length/text", _stops_early),
    "reports-the-best-logprob": Bug("L4/accuracy/choice", _reports_the_best_logprob),
    "does-not-drain": Bug("L4/life/drain", _does_not_drain),
}
"""Name of each bug to what must see it."""


def prove(name: str, backend: str) -> tuple[bool, str]:
    """Whether the check that must see the bug fails for a reason of its own, and that reason.

    Args:
        name: In BUGS.
        backend: An installed backend.
    """
    from core_conformance.records import Outcome
    from core_conformance.run import run_suite
    from core_conformance.served.options import ServedOptions
    from core_conformance.target import load_target

    target, bug = load_target(backend), BUGS[name]
    command = (sys.executable, "-m", "core_conformance.served.planted", name)
    target.served = ServedOptions(command=command, soak_seconds=4.0)
    report = run_suite(target, ["L4"], select=lambda check_id: check_id == bug.check_id)
    [record] = [record for record in report.records if record.id == bug.check_id]
    return record.outcome is Outcome.FAIL and "at its start" not in record.reason, record.reason


def _prove_all(backend: str, words: Sequence[str]) -> int:
    survived = 0
    for name, bug in BUGS.items():
        if words and not any(word in name for word in words):
            continue
        begin = time.monotonic()
        seen, reason = prove(name, backend)
        survived += not seen
        verdict = "seen" if seen else "SURVIVED"
        sys.stdout.write(f"{verdict:<9}{name:<26}{bug.check_id:<30}{time.monotonic() - begin:5.1f} s {reason[:200]}\n")
        sys.stdout.flush()
    return int(bool(survived))


def main(args: Sequence[str]) -> int:
    """See the module's text."""
    if args[0] == "run":
        return _prove_all(args[1], args[2:])
    BUGS[args[0]].plant()
    from core.cli import main as core

    sys.argv = ["core", *args[1:]]
    core()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

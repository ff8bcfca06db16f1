"""What the server needs of an engine, as protocols; `AsyncEngine` has it, and so have the fakes of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from core.outputs import EngineStats, RequestOutput
from core.sampling_params import SamplingParams

__all__ = ["ServedEngine", "ServedTokenizer"]


class ServedTokenizer(Protocol):
    """The part of `core.text.tokenizer.Tokenizer` that the server calls."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, invalid bytes replaced."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        ...


class ServedEngine(Protocol):
    """The part of `core.engine.async_engine.AsyncEngine` that the server calls."""

    @property
    def tokenizer(self) -> Any:
        """A `ServedTokenizer`."""
        ...

    @property
    def health(self) -> Any:
        """`state` is "healthy", "unresponsive", "restarting" or "dead", `reason` says why."""
        ...

    @property
    def facts(self) -> Any:
        """An `EngineFacts`: what was resolved at start."""
        ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        delta: bool = True,
        external_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come; closing the iterator aborts the request."""
        ...

    def stats(self) -> EngineStats:
        """The engine's last gauges and counters."""
        ...

    async def drain(self, timeout: float) -> Any:
        """Returns when nothing runs, or after `timeout` seconds."""
        ...

    async def shutdown(self) -> None:
        """Ends the engine and its process."""
        ...

    async def reset_prefix_cache(self) -> Any:
        """Forgets every cached block that no request holds."""
        ...

"""An AsyncEngine over a stub runner in its own process, and what tests of it need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from byte_tokenizer import byte_tokenizer
from stub_runner import FACTORY, Script

from core.engine.args import engine_config
from core.engine.async_engine import AsyncEngine
from core.engine.health import EngineEvent, HealthState, RestartPolicy
from core.outputs import EngineStats, RequestOutput
from core.sampling_params import SamplingParams

PATIENCE_S = 10.0


@contextlib.asynccontextmanager
async def running(
    script: Script | None = None,
    *,
    pieces: Mapping[int, bytes] | None = None,
    eos: tuple[int, ...] = (),
    restart: bool = True,
    on_event: Callable[[EngineEvent], None] | None = None,
    policy: RestartPolicy | None = None,
    **args: Any,
) -> AsyncIterator[AsyncEngine]:
    """A healthy engine that is shut down at the end."""
    engine = await AsyncEngine.start(
        engine_config((script or Script()).model(), **args),
        tokenizer=byte_tokenizer(pieces, eos=eos),
        restart=restart,
        on_event=on_event,
        runner_factory=FACTORY,
        restart_policy=policy or RestartPolicy(first_delay_s=0.01),
    )
    try:
        yield engine
    finally:
        await engine.shutdown()


def greedy(max_tokens: int | None = 4, **params: Any) -> SamplingParams:
    """Greedy parameters that only a limit ends."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


async def ask(engine: AsyncEngine, prompt: Any, params: SamplingParams | None = None, **more: Any) -> RequestOutput:
    """The last output of a request, with everything in it."""
    last: RequestOutput | None = None
    async for output in engine.generate(prompt, params or greedy(), delta=False, **more):
        last = output
    assert last is not None
    assert last.finished
    return last


async def until(condition: Callable[[], bool], what: str) -> None:
    """Returns when the condition holds; fails where it does not in time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"still not: {what}") from None


async def until_healthy(engine: AsyncEngine) -> None:
    """Returns when requests are taken."""
    await until(lambda: engine.health.state is HealthState.HEALTHY, f"healthy, but {engine.health}")


async def until_idle(engine: AsyncEngine) -> EngineStats:
    """Returns when the engine holds nothing of any request, and has checked its books."""

    def idle() -> bool:
        stats = engine.stats()
        running = stats.num_requests_running + stats.num_requests_waiting
        return running == 0 and stats.num_free_blocks == stats.num_blocks > 0

    await until(idle, f"idle, but {engine.stats()}")
    await engine.check_integrity()
    return engine.stats()

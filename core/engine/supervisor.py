"""Keeps one engine process running: starts it, reads its news, notices its death, starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from core.config import EngineConfig
from core.engine.child import EarlyProcess
from core.engine.client import EngineClient
from core.engine.health import EngineEvent, EngineHealth, HealthState, RestartPolicy
from core.engine.protocol import Beat, FromEngine, Ready, ToEngine
from core.engine.pulse import Pulse
from core.errors import CoreError, EngineDeadError

__all__ = ["EngineSupervisor"]

logger = logging.getLogger("core.engine")

LISTEN_S = 1.0
"""How often silence is added up."""


class EngineSupervisor:
    """The life of an engine over its processes.

    Args:
        config: What each process serves.
        env: Environment that each process starts with, over this process's.
        runner_factory: As for `build_engine`, by name.
        early: What the first process is, where it was started ahead.
        policy: Delays and bound of restarts; None never restarts.
        on_ready: A process takes requests; it knows nothing of what was sent to an earlier one.
        on_message: Takes the news of the process.
        on_lost: The process has ended for this reason, and everything in it is lost.
        on_event: For an operator's log. None of these may block; all are called in the event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        env: Mapping[str, str],
        runner_factory: str | None,
        early: EarlyProcess | None,
        policy: RestartPolicy | None,
        on_ready: Callable[[Ready], None],
        on_message: Callable[[FromEngine], None],
        on_lost: Callable[[str], None],
        on_event: Callable[[EngineEvent], None] | None,
    ) -> None:
        self._config = config
        self._env = env
        self._runner_factory = runner_factory
        self._early = early
        self._policy = policy
        self._on_ready = on_ready
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_event = on_event
        self._client: EngineClient | None = None
        self._task: asyncio.Task[None] | None = None
        limits = policy or RestartPolicy()
        self._pulse = Pulse(limits.silence_limit_s)
        self._kill_silent_after_s = limits.kill_silent_after_s
        self.health = EngineHealth(HealthState.RESTARTING, "the engine is starting")

    @property
    def healthy(self) -> bool:
        """Whether messages reach an engine now."""
        return self.health.state is HealthState.HEALTHY

    @property
    def observed_health(self) -> EngineHealth:
        """`health`, and whether a process that should be healthy still gives signs of life."""
        problem = self._pulse.problem if self.healthy else None
        return self.health if problem is None else EngineHealth(HealthState.UNRESPONSIVE, problem)

    async def start(self) -> None:
        """Returns when the first process takes requests; it is looked after from then on.

        Raises:
            CoreError: the very error that the engine could not be built for; nothing is left running.
        """
        await self._launch()
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")

    def send(self, message: ToEngine) -> None:
        """Queues a message for the process; never blocks.

        Raises:
            EngineDeadError: there is no process to take it; says why, and whether to try again.
        """
        self.check()
        assert self._client is not None
        self._client.send(message)

    def check(self) -> None:
        """Raises EngineDeadError where no process takes messages; says why, and whether to try again."""
        if self.health.state is HealthState.RESTARTING:
            raise EngineDeadError(f"the engine is starting again ({self.health.reason}); try again in a few seconds")
        if self.health.state is HealthState.DEAD:
            raise EngineDeadError(f"the engine is dead ({self.health.reason}); restart the server")

    async def stop(self, timeout_s: float) -> None:
        """Ends the process, after `timeout_s` by force, and looks after it no more. A second call has no effect."""
        reason = "the engine was shut down"
        self.health = EngineHealth(HealthState.DEAD, reason)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._on_lost(reason)
        if self._client is not None:
            await self._client.stop(timeout_s)

    async def _launch(self) -> None:
        early, self._early = self._early, None
        self._client, ready = await EngineClient.launch(
            self._config,
            runner_factory=self._runner_factory,
            env=self._env,
            early=None if early is None else early.process,
        )
        self._pulse.news()
        self._on_ready(ready)
        self.health = EngineHealth(HealthState.HEALTHY)
        self._tell("started", f"engine process {ready.facts.pid} is ready: {ready.facts.resolved}")

    async def _supervise(self) -> None:
        while self.healthy:
            assert self._client is not None
            reason = await self._read_until_death(self._client)
            self.health = EngineHealth(HealthState.RESTARTING, reason)
            self._on_lost(reason)
            self._tell("died", reason)
            await self._client.stop(0.0)
            await self._start_again()

    async def _read_until_death(self, client: EngineClient) -> str:
        """Passes news on until the process ends, is silent for too long, or its news cannot be read; why it did."""
        reader = asyncio.create_task(self._read(client), name="engine-reader")
        listener = asyncio.create_task(self._listen(), name="engine-listener")
        ends: list[asyncio.Future[Any]] = [reader, listener, client.exited]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            listener.cancel()
            await asyncio.wait([reader, listener])
        self.health = EngineHealth(HealthState.RESTARTING, "the engine process died")
        if not listener.cancelled() and not client.exited.done():
            return f"{listener.result()}; it is killed"
        if reader.cancelled():
            return await client.last_words()
        reason = f"the engine's news could not be read ({reader.exception()!r})"
        logger.error("%s; its process is ended", reason, exc_info=reader.exception())
        return reason

    async def _read(self, client: EngineClient) -> None:
        while True:
            message = await client.receive()
            self._pulse.news(message.step_s if isinstance(message, Beat) else 0.0)
            if not isinstance(message, Beat):
                self._on_message(message)

    async def _listen(self) -> str:
        """Returns when the process has been silent for so long that it is given up; what was found."""
        known = False
        while self._pulse.silent_s < self._kill_silent_after_s:
            await asyncio.sleep(LISTEN_S)
            self._pulse.wait(LISTEN_S)
            problem = self._pulse.problem
            if problem is not None and not known:
                logger.warning("%s", problem)
            known = problem is not None
        return f"the engine process gave no sign of life for {self._pulse.silent_s:.0f} s"

    async def _start_again(self) -> None:
        """Tries until the engine is healthy, or dead for good."""
        while not self.healthy:
            delay_s = self._policy.next_delay_s() if self._policy is not None else None
            if delay_s is None:
                self.health = EngineHealth(HealthState.DEAD, self.health.reason)
                self._tell("gave_up", f"the engine is not started again: {self.health.reason}")
                return
            await asyncio.sleep(delay_s)
            try:
                await self._launch()
            except CoreError as error:
                self.health = EngineHealth(HealthState.RESTARTING, str(error))
                self._tell("restart_failed", str(error))

    def _tell(self, kind: str, message: str) -> None:
        logger.log(logging.INFO if kind == "started" else logging.ERROR, "%s", message)
        if self._on_event is not None:
            self._on_event(EngineEvent(kind, message))

"""The engine that a server talks to: requests in, streams of RequestOutput out, the engine itself in a child process
that is started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from core.config import EngineConfig
from core.engine.build import load_tokenizer
from core.engine.child import EarlyProcess, choose_device
from core.engine.health import EngineEvent, EngineHealth, RestartPolicy
from core.engine.heap import release_heap
from core.engine.input_processor import InputProcessor, ProcessedRequest
from core.engine.output_processor import OutputKind, OutputProcessor
from core.engine.protocol import Abort, Add, Call, EngineFacts, FromEngine, Outputs, Ready, Rejected, Reply
from core.engine.supervisor import EngineSupervisor
from core.errors import CoreError, EngineDeadError
from core.outputs import EngineStats, RequestOutput
from core.sampling_params import SamplingParams
from core.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine"]

LONG_INPUT = 16_384
"""Characters and ids of a request from which on it is processed in a thread, so that the streams of others go on."""
SERVED_STEP_STRETCH = 2.0
"""How many times as long prompts may make a step of a server unless the operator says so."""
STOP_TIMEOUT_S = 10.0
"""Seconds that a process has to end when asked to; it is killed then."""

_Stream = asyncio.Queue[RequestOutput | CoreError]


class AsyncEngine:
    """Serves many requests at once from one event loop. Made by `AsyncEngine.start`; ended by `shutdown`.

    When the engine process dies, every request in flight raises EngineDeadError at once, and so does every new one
    until the process is up again: nothing waits for a restart. `health` says which it is.

    A request that fails alone (its step raised) does not raise: its choice ends with finish_reason "error" and says
    why in `error`.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        env: Mapping[str, str],
        runner_factory: str | None,
        early: EarlyProcess | None,
        policy: RestartPolicy | None,
        on_event: Callable[[EngineEvent], None] | None,
    ) -> None:
        self._max_logprobs = config.max_logprobs
        self._tokenizer = tokenizer
        self._supervisor = EngineSupervisor(
            config,
            env=env,
            runner_factory=runner_factory,
            early=early,
            policy=policy,
            on_ready=self._on_ready,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_event=on_event,
        )
        self._facts: EngineFacts
        self._inputs: InputProcessor
        self._outputs = OutputProcessor(tokenizer)
        self._stats = EngineStats()
        self._streams: dict[str, _Stream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._call_ids = itertools.count()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        restart: bool = True,
        on_event: Callable[[EngineEvent], None] | None = None,
        runner_factory: str | None = None,
        restart_policy: RestartPolicy | None = None,
        early: EarlyProcess | None = None,
    ) -> AsyncEngine:
        """A healthy engine; returns when its process takes requests.

        Args:
            config: What to serve.
            tokenizer: None loads the one that `config` names.
            restart: Whether a process that died is started again.
            on_event: Called in the event loop, for a log; must not block.
            runner_factory: As for `build_engine`, by name; for tests and embedders.
            restart_policy: Delays and bound of restarts.
            early: The first process, where it was started ahead for `config`; its owner stays who started it.

        Raises:
            CoreError: the very error that the engine could not be built for.
        """
        if config.scheduler.max_step_stretch is None:
            scheduler = msgspec.structs.replace(config.scheduler, max_step_stretch=SERVED_STEP_STRETCH)
            config = msgspec.structs.replace(config, scheduler=scheduler)
        env: Mapping[str, str] = {}
        if early is not None:
            env = early.env
        elif runner_factory is None:
            config, env = await asyncio.to_thread(choose_device, config)
        policy = (restart_policy or RestartPolicy()) if restart else None
        engine = cls(
            config, tokenizer, env=env, runner_factory=runner_factory, early=early, policy=policy, on_event=on_event
        )
        # A large vocabulary takes seconds, as the process's own imports do: side by side.
        launching = asyncio.ensure_future(engine._supervisor.start())
        try:
            if tokenizer is None:
                engine._take_tokenizer(await asyncio.to_thread(load_tokenizer, config))
                await asyncio.to_thread(release_heap)
            await launching
        except BaseException:
            launching.cancel()
            with contextlib.suppress(asyncio.CancelledError, CoreError):
                await launching
            await engine._supervisor.stop(0.0)
            raise
        return engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the served model."""
        return self._tokenizer

    @property
    def facts(self) -> EngineFacts:
        """What is served; a restart replaces it."""
        return self._facts

    @property
    def health(self) -> EngineHealth:
        """Whether requests are taken, and why not."""
        return self._supervisor.observed_health

    @property
    def errored(self) -> bool:
        """Whether requests are refused now because the engine is not healthy."""
        return not self._supervisor.healthy

    def stats(self) -> EngineStats:
        """Gauges and counters of the engine as of its last message; all zero after it died."""
        return self._stats

    async def generate(
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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come, the last one with `finished`.

        Nothing happens, and nothing is checked, before the first item is asked for. Closing or cancelling the
        iterator ends every choice in the engine before its next step, also while the request is still queued.

        Args:
            prompt: Text or token ids; a rendered chat comes as ids.
            params: How to sample.
            request_id: A label, echoed in the outputs and taken by `abort`; need not be unique.
            priority: Lower runs first.
            cache_salt: Requests share cached prefixes only where their salts are equal.
            adapter: Name of a LoRA adapter.
            delta: Whether outputs hold only what is new; else each holds everything so far.
            external_id: Another label, for traces.

        Raises:
            InvalidRequestError: the request is wrong.
            QueueFullError: the waiting queue is full; raised at once.
            EngineDeadError: the engine died, is starting again, or is shutting down.
        """
        self._check_open()
        request = await self._process(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            external_id=external_id,
        )
        stream = self._add(request, OutputKind.DELTA if delta else OutputKind.CUMULATIVE)
        try:
            finished = False
            while not finished:
                item = await stream.get()
                if isinstance(item, CoreError):
                    raise item
                finished = item.finished
                yield item
        finally:
            self._drop(request.key)

    async def abort(self, request_id: str) -> None:
        """Ends every request with this label; their streams end with finish_reason "abort". Unknown labels do nothing.

        Args:
            request_id: As given to `generate`, or as found in its outputs.
        """
        for key in self._outputs.keys_of(request_id):
            last, engine_ids = self._outputs.abort(key)
            self._send_abort(engine_ids)
            self._streams[key].put_nowait(last)

    async def reset_prefix_cache(self) -> None:
        """Makes sure that no later request reuses what has been computed up to now; running requests go on.

        Raises:
            EngineDeadError: the engine is not up.
        """
        await self._call("reset_prefix_cache")

    async def check_integrity(self) -> None:
        """For tests: raises CoreError where the engine's bookkeeping contradicts itself."""
        await self._call("check_integrity")

    async def drain(self, timeout: float) -> bool:
        """Takes no new requests and lets those in flight end; after `timeout` seconds the rest is aborted.

        Returns:
            Whether every request ended by itself.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        left = list(self._streams)
        for key in left:
            last, engine_ids = self._outputs.abort(key)
            self._send_abort(engine_ids)
            self._streams[key].put_nowait(last)
        return not left

    async def shutdown(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Ends the engine process; requests in flight raise EngineDeadError. A second call has no effect."""
        self._draining = True
        await self._supervisor.stop(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    # --- requests ---

    def _check_open(self) -> None:
        if self._draining:
            raise EngineDeadError("the engine is shutting down and takes no new requests; send it elsewhere")
        self._supervisor.check()

    async def _process(self, prompt: str | Sequence[int], params: SamplingParams, **labels: object) -> ProcessedRequest:
        if len(prompt) + sum(map(len, params.bad_words)) >= LONG_INPUT:
            return await asyncio.to_thread(self._inputs.process, prompt, params, **labels)  # type: ignore[arg-type]
        return self._inputs.process(prompt, params, **labels)  # type: ignore[arg-type]

    def _add(self, request: ProcessedRequest, kind: OutputKind) -> _Stream:
        self._check_open()
        self._supervisor.send(Add(list(request.choices)))
        stream: _Stream = asyncio.Queue()
        self._outputs.add(request, kind)
        self._streams[request.key] = stream
        self._idle.clear()
        return stream

    def _drop(self, key: str) -> None:
        """Forgets the request, and ends it in the engine where it still runs."""
        self._send_abort(self._outputs.discard(key))
        self._streams.pop(key, None)
        if not self._streams:
            self._idle.set()

    def _send_abort(self, engine_ids: Sequence[str]) -> None:
        if engine_ids:
            with contextlib.suppress(EngineDeadError):  # what died runs nothing any more
                self._supervisor.send(Abort(list(engine_ids)))

    async def _call(self, method: str) -> None:
        call_id = next(self._call_ids)
        self._supervisor.send(Call(call_id, method))
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            del self._calls[call_id]

    # --- what the supervisor tells ---

    def _take_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Before the first request."""
        self._tokenizer, self._outputs = tokenizer, OutputProcessor(tokenizer)
        if self._supervisor.healthy:
            self._make_inputs()

    def _on_ready(self, ready: Ready) -> None:
        self._facts, self._stats = ready.facts, ready.stats
        self._make_inputs()

    def _make_inputs(self) -> None:
        self._inputs = InputProcessor(
            self._tokenizer,
            vocab_size=self._facts.vocab_size,
            max_model_len=self._facts.max_model_len,
            max_logprobs=self._max_logprobs,
            eos_token_ids=self._tokenizer.eos_token_ids if self._tokenizer is not None else (),
        )

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                self._take_outputs(message)
            case Rejected(engine_ids, error):
                for key in {engine_id.rpartition("-")[0] for engine_id in engine_ids} & self._streams.keys():
                    self._outputs.discard(key)
                    self._streams[key].put_nowait(error.error())
            case Reply(call_id, error):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    future.set_result(None) if error is None else future.set_exception(error.error())

    def _take_outputs(self, message: Outputs) -> None:
        self._stats = message.stats
        news, finished_early = self._outputs.process(message.outputs)
        self._send_abort(finished_early)
        for key, output in news:
            self._streams[key].put_nowait(output)

    def _on_lost(self, reason: str) -> None:
        """Ends every request in flight and every pending call with EngineDeadError."""
        message = f"{reason}; the request is lost, send it again"
        for key, stream in self._streams.items():
            self._outputs.discard(key)
            stream.put_nowait(EngineDeadError(message))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(message))
        self._stats = EngineStats()

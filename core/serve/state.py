"""The server's state: its engine, once there is one, and what every route asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence

from starlette.requests import Request

from core.errors import EngineDeadError, QueueFullError
from core.outputs import EngineStats, RequestOutput
from core.sampling_params import SamplingParams
from core.serve.errors import ApiError, NotReadyError
from core.serve.guard import check_request_id
from core.serve.interface import ServedEngine
from core.serve.metrics import RequestRecord, ServerMetrics
from core.serve.prompts import ChatRenderer
from core.serve.protocol import Prompt, SamplingFields
from core.serve.settings import ServeSettings

__all__ = ["RequestLabels", "ServerState", "server_state"]


class RequestLabels:
    """Names of one HTTP request.

    Args:
        prefix: "cmpl" or "chatcmpl".
        label: The id that the caller chose, or None. It may be shared by requests in flight.
    """

    def __init__(self, prefix: str, label: str | None) -> None:
        self.label = label
        self.public_id = f"{prefix}-{label or uuid.uuid4().hex}"
        self.created = int(time.time())


class ServerState:
    """What lives as long as the server.

    Args:
        settings: The operator's.
        model: The model as the operator named it; its public name where `served_model_names` is empty.
        engine: May come later, by `attach`: the server answers 503 until then.
        renderer: Conversations to token ids; None where the model has no chat template.
    """

    def __init__(
        self,
        settings: ServeSettings,
        model: str,
        engine: ServedEngine | None = None,
        renderer: ChatRenderer | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.names = settings.served_model_names or (model,)
        self.started = time.time()
        self.draining = False
        self.scheduling_policy = "fcfs"
        self.num_requests = 0
        """Requests being answered now (GET /load)."""
        self.metrics = ServerMetrics(self.names[0], self._stats, self._cache_config)
        self.renderer = renderer or ChatRenderer(None)
        self._engine = engine

    def attach(self, engine: ServedEngine, renderer: ChatRenderer) -> None:
        """The engine is ready; requests are taken from now on."""
        self.renderer = renderer
        self._engine = engine

    def _stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.stats()

    def _cache_config(self) -> dict[str, str]:
        block_size = getattr(self.engine.facts, "block_size", None)
        return {} if block_size is None else {"block_size": str(block_size)}

    @property
    def engine(self) -> ServedEngine:
        """The engine.

        Raises:
            NotReadyError: it is still being loaded.
        """
        if self._engine is None:
            raise NotReadyError(f"the model {self.names[0]!r} is being loaded; try again soon", code="loading")
        return self._engine

    def problem(self) -> NotReadyError | None:
        """Why the server takes no requests now; None where it does."""
        if self.draining:
            return NotReadyError("the server is shutting down; send the request elsewhere", code="shutting_down")
        if self._engine is None:
            return NotReadyError(f"the model {self.names[0]!r} is being loaded; try again soon", code="loading")
        health = self._engine.health
        status = str(health.state)
        if status == "healthy":
            return None
        return NotReadyError(f"the engine is {status}: {health.reason or 'no reason known'}", code=f"engine_{status}")

    def admit(self, model: str | None) -> None:
        """Raises where the server takes no requests now (503) or does not serve `model` (404)."""
        problem = self.problem()
        if problem is not None:
            raise problem
        self.check_model(model)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404, `model_not_found`) where `model` is given and not served."""
        if model is not None and model not in self.names:
            served = ", ".join(repr(name) for name in self.names)
            message = f"the model {model[:200]!r} is not served here; use {served}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def labels(self, body: SamplingFields, request: Request, prefix: str) -> RequestLabels:
        """Ids of a request; `request_id` of the body wins over the header `X-Request-Id`."""
        if body.request_id is not None:
            check_request_id(body.request_id, "request_id")
        return RequestLabels(prefix, body.request_id or request.headers.get("x-request-id"))

    def check_priority(self, priority: int) -> None:
        """Raises ApiError (400) where a priority would be without effect."""
        if priority != 0 and self.scheduling_policy != "priority":
            message = f"priority {priority} needs a server started with --scheduling-policy priority; leave it out"
            raise ApiError(400, message, param="priority")

    async def generate(
        self, prompt: Prompt, params: SamplingParams, body: SamplingFields, labels: RequestLabels
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt, counted for /metrics. Closing it aborts the request."""
        record = RequestRecord(self.metrics, params)
        last: RequestOutput | None = None
        aborted = failed = False
        source = self.engine.generate(
            prompt, params, priority=body.priority, cache_salt=body.cache_salt, external_id=labels.label
        )
        try:
            async for output in source:
                last = output
                record.output(output)
                yield output
        except QueueFullError:
            self.metrics.admission_rejections["queue_full"] += 1
            raise
        except EngineDeadError:
            failed = True
            raise
        except (asyncio.CancelledError, GeneratorExit):
            aborted = True
            raise
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()
            if last is not None or aborted or failed:
                record.finish(last, failed=failed)

    def generate_all(
        self, prompts: Sequence[Prompt], params: SamplingParams, body: SamplingFields, labels: RequestLabels
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        """`generate` for each prompt."""
        return [self.generate(prompt, params, body, labels) for prompt in prompts]

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request as being answered while the block runs."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


def server_state(request: Request) -> ServerState:
    """The state that `build_app` gave to the app of `request`."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state

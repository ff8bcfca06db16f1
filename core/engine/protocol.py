"""Messages between the AsyncEngine and its engine process: msgpack over two ipc sockets, one tagged struct each."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

import core.errors
from core.config import EngineConfig
from core.errors import CoreError
from core.outputs import EngineOutput, EngineStats
from core.request import EngineRequest

__all__ = [
    "Abort",
    "Add",
    "Beat",
    "Call",
    "Dying",
    "EngineFacts",
    "Failed",
    "FromEngine",
    "Launch",
    "Outputs",
    "Ready",
    "Rejected",
    "Reply",
    "Shutdown",
    "ToEngine",
    "WireError",
    "decode_from_engine",
    "decode_launch",
    "decode_to_engine",
    "encode",
]


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a ready engine serves; constant until it is started again."""

    model: str
    """As the operator named it."""
    architecture: str
    vocab_size: int
    """Token ids in a request are in [0, vocab_size)."""
    max_model_len: int
    """Longest sequence, prompt and output, that is really served."""
    dtype: str
    device: str
    """As the operator asked for it; `resolved` says what came of it."""
    resolved: str
    """One line of what device, dtype and operations were resolved to."""
    num_blocks: int
    block_size: int
    num_parameters: int = 0
    pid: int = 0
    """Process that runs the engine."""


class WireError(msgspec.Struct, frozen=True, kw_only=True):
    """A CoreError on its way to another process; `error()` gives one of the same class, message and attributes."""

    kind: str
    message: str
    fields: dict[str, str | int | float | bool | None] = {}

    @classmethod
    def of(cls, error: Exception) -> WireError:
        """The wire form of any exception; one that is no CoreError becomes a plain CoreError that names its class."""
        if not isinstance(error, CoreError):
            return cls(kind="CoreError", message=f"{type(error).__name__}: {error}")
        plain = {k: v for k, v in vars(error).items() if v is None or isinstance(v, (str, int, float, bool))}
        return cls(kind=type(error).__name__, message=str(error), fields=plain)

    def error(self) -> CoreError:
        """The exception, ready to be raised."""
        found = getattr(core.errors, self.kind, CoreError)
        kind = found if isinstance(found, type) and issubclass(found, CoreError) else CoreError
        error: CoreError = kind.__new__(kind)
        error.args = (self.message,)
        error.__dict__.update(self.fields)
        return error


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process is told through its standard input, before anything else."""

    config: EngineConfig
    inbox: str
    """ipc address that the engine receives from."""
    outbox: str
    """ipc address that the engine sends to."""
    runner_factory: str | None = None
    """"module:function" called with the config in place of the device's own runner; for tests and embedders."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Take these requests, all or none: they are the choices of one request of the caller."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; unknown ids are ignored. No output follows."""

    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Run one of the engine's named operations; a Reply with the same `call_id` follows."""

    call_id: int
    method: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process after the step at hand."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests."""

    facts: EngineFacts
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be built; the process ends with `exit_code`."""

    error: WireError
    exit_code: int


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """News of one step, with the gauges after it. Sent without outputs where only the gauges changed."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine did not take the requests of one Add; none of them is known to it."""

    request_ids: list[str]
    error: WireError


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to a Call: it was done, or why not."""

    call_id: int
    error: WireError | None = None


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The process lives; sent by a thread that only sends these."""

    step_s: float = 0.0
    """Seconds that the step at hand has taken up to now; 0 without one."""


class Dying(msgspec.Struct, frozen=True, tag="dying"):
    """The process ends now, for this reason."""

    reason: str


ToEngine = Add | Abort | Call | Shutdown
"""What a parent says to its engine process."""
FromEngine = Ready | Failed | Outputs | Rejected | Reply | Beat | Dying
"""What an engine process says to its parent."""

encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
"""Bytes of a message."""
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
"""The message to an engine in these bytes; raises msgspec.DecodeError."""
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
"""The message of an engine in these bytes; raises msgspec.DecodeError."""
decode_launch: Callable[[bytes], Launch] = msgspec.msgpack.Decoder(Launch).decode
"""What a new process is started with; raises msgspec.DecodeError."""

"""The servers that the checks of L4 ask for, one at a time: a device may take no second process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from core.backend import Kind
from core.spec import DType
from core_conformance.operations.samples import core_operations
from core_conformance.records import ErrorOutcome, Mode
from core_conformance.served.long_copy import served_copy_folder
from core_conformance.served.options import ServedOptions
from core_conformance.served.server import Server
from core_conformance.served.speed_model import speed_folder
from core_conformance.subject import Mismatch
from core_conformance.target import Target

__all__ = ["CHAT_TEMPLATE", "ROOMY", "SMALL", "SMALL_QUEUE", "SMALL_TOKENS", "SPEED", "Servers", "Setup"]

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The copy model's: what was said, and nothing else, so that its answer is known as well."""
SMALL_TOKENS = 512
"""Tokens that the small pool holds, or two blocks of each kind where blocks are large."""
SMALL_QUEUE = 8
"""Requests that may wait at the small server."""


@dataclass(frozen=True)
class Setup:
    """A way to serve.

    Args:
        model: "copy", "speed", or the path of a real checkpoint.
        pool_tokens: Tokens that the KV pool holds.
        flags: Further ones of `core serve`.
    """

    model: str
    pool_tokens: int
    flags: tuple[str, ...] = ()


ROOMY = Setup("copy", 64 * 256, ("--chat-template", CHAT_TEMPLATE))
"""The copy model with room for all that the checks ask at once."""
SMALL = Setup("copy", SMALL_TOKENS, ("--max-num-queued-reqs", str(SMALL_QUEUE), "--max-num-seqs", "8"))
"""The copy model with a pool and a queue that are too small."""
SPEED = Setup("speed", 4096, ("--max-num-seqs", "16", "--no-enable-prefix-caching"))
"""A model large enough that a step's time is that of its weights."""


class Servers:
    """Starts what a check asks for and stops what ran before; a context manager that leaves nothing behind.

    Args:
        target: The backend under test. Its shared instance is closed before a server takes the device.
        options: The caller's.
    """

    def __init__(self, target: Target, options: ServedOptions) -> None:
        self.target, self.options = target, options
        self._setup: Setup | None = None
        self._server: Server | None = None
        self._failed: dict[Setup, str] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def get(self, setup: Setup) -> Server:
        """A healthy server of this kind.

        Raises:
            ErrorOutcome: the backend is not installed, so that `core serve` cannot know it.
            Mismatch: the server does not start; said again, without another try, to every check that asks.
        """
        self.require_installed()
        if setup in self._failed:
            raise Mismatch(self._failed[setup])
        if self._setup == setup and self._server is not None and self._server.alive:
            return self._server
        self.stop()
        self._server, self._setup = self._make(setup), setup
        try:
            self._server.start()
        except Mismatch as error:
            self._failed[setup], self._server = str(error), None
            raise
        return self._server

    def require_installed(self) -> None:
        """Raises ErrorOutcome where the backend is no installed package."""
        if not self.target.installed:
            raise ErrorOutcome(
                f"backend {self.target.name!r} is no installed package, and `core serve --device NAME` starts only "
                "those; install it as a package with an entry point in core.backends, then run L4"
            )

    def stop(self) -> int | None:
        """Stops the server that runs, if one does, and returns its exit code."""
        server, self._server, self._setup = self._server, None, None
        return None if server is None else server.stop()

    def _make(self, setup: Setup) -> Server:
        block_size = self.target.backend.capabilities.block_sizes[0]
        self.target.close()
        blocks = max(setup.pool_tokens // block_size, 2) + 1  # one is reserved
        command = [*self.options.command, "serve", str(self.folder(setup)), "--dtype", self.dtype.value]
        command += ["--device", f"{self.target.name}:{self.target.index}"]
        command += ["--block-size", str(block_size), "--num-kv-blocks", str(blocks), *setup.flags]
        return Server(command, _without_hub(self.options.environment), self.options.start_seconds)

    def folder(self, setup: Setup) -> Path:
        """The checkpoint that this setup serves."""
        if setup.model == "speed":
            return speed_folder(simulated=self.target.mode is Mode.SIMULATED)
        return served_copy_folder() if setup.model == "copy" else Path(setup.model)

    @property
    def dtype(self) -> DType:
        """bfloat16, or float16 where the device has no bfloat16: one of them belongs to the mandatory core."""
        backend, device = self.target.make(), self.target.device
        refused = [op for op in core_operations(DType.BFLOAT16) if backend.supports(op, device).kind is Kind.NO]
        return DType.FLOAT16 if refused else DType.BFLOAT16

    def real_model(self) -> Setup | None:
        """The setup of the caller's checkpoint; None where it gave none."""
        if self.options.model is None:
            return None
        return dataclasses.replace(SPEED, model=str(self.options.model), flags=())


def _without_hub(environment: Mapping[str, str]) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **environment}

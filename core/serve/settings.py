"""What an operator may set on the server itself; the engine's own settings are `core.config.EngineConfig`."""

from __future__ import annotations

import msgspec

from core.errors import ConfigError

__all__ = ["ServeSettings"]


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is offered over HTTP.

    Raises:
        ConfigError: on construction, naming flag and value.
    """

    host: str = "0.0.0.0"
    """Address to listen on (`--host`)."""
    port: int = 8000
    """TCP port; 0 takes a free one (`--port`)."""
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use, the first is reported; empty takes the model as given (`--served-model-name`)."""
    api_keys: tuple[str, ...] = ()
    """Keys that open every route; empty leaves the server open (`--api-key`)."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Larger request bodies get 413 (`--max-request-bytes`)."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM or SIGINT (`--shutdown-timeout`)."""
    trust_special_tokens: bool = False
    """Read control tokens spelled out in chat messages as control tokens (`--trust-special-tokens`)."""
    chat_template: str | None = None
    """A Jinja file, or the template itself, that replaces the model's own (`--chat-template`)."""
    log_requests: bool = False
    """Write one line for each HTTP request (`--enable-log-requests`)."""
    dev_routes: bool = False
    """Offer routes that change the server's state, as POST /reset_prefix_cache (`--enable-dev-routes`)."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be in [0, 65535], got {self.port}; give a free TCP port")
        if self.max_body_bytes < 1024:
            raise ConfigError(
                f"--max-request-bytes must be at least 1024, got {self.max_body_bytes}; give a larger value"
            )
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(
                f"--shutdown-timeout must be finite and at least 0, got {self.shutdown_timeout}; give seconds"
            )
        if not self.host:
            raise ConfigError("--host must not be empty; give an address, 0.0.0.0 for all of this machine")
        if not all(self.api_keys):
            raise ConfigError("--api-key must not be empty; give a key, or leave the flag out for an open server")
        if not all(self.served_model_names):
            raise ConfigError("--served-model-name must not be empty; give a name, or leave the flag out")

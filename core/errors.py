"""One tree of errors. A message says what was wrong, with the value, and ends with what to do."""

from __future__ import annotations

__all__ = [
    "BackendNotFoundError",
    "BackendUnavailableError",
    "ConfigError",
    "ContextLengthError",
    "ContractVersionError",
    "CoreError",
    "EngineDeadError",
    "InvalidRequestError",
    "ModelLoadError",
    "ModelNotFoundError",
    "QueueFullError",
    "TemplateError",
    "UnsupportedError",
]


class CoreError(Exception):
    """Base of every error that this project raises on purpose. A command prints it without a traceback."""

    exit_code = 1


class ConfigError(CoreError, ValueError):
    """A flag, a configuration value or a file of the user is wrong."""

    exit_code = 2


class BackendNotFoundError(CoreError):
    """No installed backend has the name asked for."""

    exit_code = 2


class BackendUnavailableError(CoreError):
    """The backend is installed but finds no usable device, driver or SDK."""

    exit_code = 2


class ContractVersionError(CoreError):
    """The backend was built for another version of the contract than this core can drive."""

    exit_code = 2


class UnsupportedError(CoreError):
    """A backend declares that it cannot do the operation.

    Args:
        operation: Name of the operation, as in `OpSpec.name`.
        reason: Why, in the words of the one who refuses.
        remedy: What the user can do about it.
    """

    exit_code = 2

    def __init__(self, operation: str, reason: str, remedy: str = "choose another device, dtype or model") -> None:
        super().__init__(f"operation {operation!r} is not supported: {reason}; {remedy}")
        self.operation = operation
        self.reason = reason
        self.remedy = remedy


class ModelNotFoundError(CoreError):
    """The model's files are nowhere to be found."""

    exit_code = 2


class ModelLoadError(CoreError):
    """The model's files are there and cannot be used: a shard is missing, a tensor has the wrong shape, ..."""

    exit_code = 2


class InvalidRequestError(CoreError, ValueError):
    """A request is wrong; the server answers 400.

    Args:
        message: What is wrong, with the value, and what to do.
        param: The request field at fault, as the caller spelled it.
        code: A short machine-readable reason.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit the context window or the KV pool."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class TemplateError(InvalidRequestError):
    """A chat template failed, refused the conversation, or took too long."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="template_error")


class QueueFullError(CoreError):
    """The waiting queue is full; the server answers 429 with Retry-After.

    Args:
        message: What is full, with the numbers.
        retry_after_s: Seconds after which a retry makes sense.
    """

    status = 429

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(CoreError):
    """The engine process died or does not answer; requests in flight are lost and may be sent again."""

    status = 503

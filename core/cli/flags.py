"""How commands take the flags of the tables, from the command line and from a YAML file, and what is made of them."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from core.cli.flag_tables import ENGINE_FLAGS, SERVE_FLAGS, Flag
from core.config import EngineConfig
from core.errors import ConfigError

__all__ = ["engine_args", "engine_config", "parse_bytes", "serve_settings", "with_flags"]


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_LISTS = frozenset(flag.name for flag in SERVE_FLAGS if flag.kind == list[str])
_BYTE_FIELDS = frozenset({"kv_cache_memory_bytes", "swap_space_bytes", "max_body_bytes"})


def parse_bytes(text: str, flag: str) -> int:
    """Bytes meant by "500M" (powers of 1000), "4GiB" (powers of 1024) or a plain number.

    Raises:
        ConfigError: the text is none of these.
    """
    match = _BYTES.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"{flag} must be a size such as 4GiB, 500M or a number of bytes, got {text!r}")
    number, letter, binary = match.groups()
    power = "kmgt".find(letter.lower()) + 1 if letter else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def engine_args(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of an engine from flag values by name; None means not given.

    Raises:
        ConfigError: a size is malformed.
    """
    given = {flag.name: _value(flag, values.get(flag.name)) for flag in ENGINE_FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("max_model_len") == -1:
        del given["max_model_len"]
    return given


def engine_config(model: str, values: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an engine from flag values by name.

    Raises:
        ConfigError: a value is out of range.
    """
    from core.engine.args import engine_config as from_args

    return from_args(model, **engine_args(values))


def serve_settings(values: Mapping[str, Any]) -> Any:
    """The server's settings from flag values by name; None means not given.

    Raises:
        ConfigError: a value is out of range.
    """
    from core.serve.settings import ServeSettings

    given = {flag.name: _value(flag, values.get(flag.name)) for flag in SERVE_FLAGS}
    return ServeSettings(**{name: value for name, value in given.items() if value is not None})


def _value(flag: Flag, value: Any) -> Any:
    if value is None:
        return None
    if flag.name in _BYTE_FIELDS:
        return parse_bytes(value, flag.names[0])
    if isinstance(value, list):
        return tuple(value) or None
    return value


def _default_of(flag: Flag) -> str:
    if flag.default:
        return flag.default
    from core.serve.settings import ServeSettings

    owner: Any = ServeSettings() if flag in SERVE_FLAGS else EngineConfig(model="")
    for part in flag.field.split("."):
        owner = getattr(owner, part)
    return str(owner).lower() if isinstance(owner, bool) else str(owner)


def _parameter(flag: Flag, panel: str) -> inspect.Parameter:
    text = f"{flag.text} [default: {_default_of(flag)}]"
    option = typer.Option(
        *flag.names, help=text, show_default=False, envvar=flag.envvar, show_envvar=True, rich_help_panel=panel
    )
    kind: Any = flag.kind
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_flags(**tables: Iterable[Flag]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the flags of `tables` and a `--config FILE`.

    Each keyword names a parameter of the command and the table whose values, by flag name, it receives as a dict.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in tables]
        flags = {key: list(table) for key, table in tables.items()}
        added = [_parameter(flag, f"{key.capitalize()} options") for key, table in flags.items() for flag in table]

        @functools.wraps(command)
        def run(**kwargs: Any) -> Any:
            kwargs.pop("config_file", None)
            groups = {key: {flag.name: kwargs.pop(flag.name) for flag in table} for key, table in flags.items()}
            return command(**kwargs, **groups)

        del run.__wrapped__
        parameters = [*own, *added, _config_parameter()]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _config_parameter() -> inspect.Parameter:
    text = "YAML file with flag names as keys; flags on the command line win."
    option = typer.Option("--config", help=text, callback=_read_config, is_eager=True, metavar="FILE")
    annotation: Any = Annotated[str | None, option]
    return inspect.Parameter("config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _read_config(context: typer.Context, path: str | None) -> str | None:
    """Makes the file's values the defaults of the command's options."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_config_values(context, path)}
    return path


def _config_values(context: typer.Context, path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            given = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"--config {path!r} cannot be read: {error.strerror}; check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path!r} is no YAML: {str(error)[:300]}; write 'flag-name: value' lines") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--config {path!r} must hold 'flag-name: value' lines, got {type(given).__name__}")
    known = _names_of(context)
    values = {}
    for key, value in given.items():
        name = known.get(str(key).replace("_", "-").removeprefix("--"))
        if name is None:
            raise ConfigError(f"--config {path!r} holds {key!r}, which is no flag of this command; see --help")
        # A lone string where a flag may be repeated would be read letter by letter.
        values[name] = [value] if isinstance(value, str) and name in _LISTS else value
    return values


def _names_of(context: typer.Context) -> dict[str, str]:
    """Parameter name by every spelling of its flag, without dashes in front."""
    names: dict[str, str] = {}
    for parameter in context.command.params:
        assert parameter.name is not None
        for spelling in (parameter.name.replace("_", "-"), *parameter.opts):
            names[spelling.lstrip("-")] = parameter.name
    return names

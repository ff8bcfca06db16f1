"""Flags against the configuration, the YAML file and the documentation."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from core.cli.app import app
from core.cli.flag_tables import ENGINE_FLAGS, SERVE_FLAGS
from core.cli.flags import engine_config, parse_bytes, serve_settings, with_flags
from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.errors import ConfigError
from core.serve.app import DEV_ROUTES, ROUTES
from core.serve.settings import ServeSettings

REPO_ROOT = Path(__file__).resolve().parents[3]
DOCS = REPO_ROOT / "docs"

NOT_FLAGS = {
    "model": "the command's argument",
    "scheduler": "a group",
    "cache": "a group",
    "scheduler.max_model_len": "set by --max-model-len",
    "scheduler.num_spec_tokens": "set by whoever brings a drafter",
    "scheduler.force_preemption": "for tests",
}


def fields_of(kind: type[Any], prefix: str = "") -> set[str]:
    return {prefix + name for name in kind.__struct_fields__}


def test_every_engine_field_has_a_flag() -> None:
    fields = fields_of(EngineConfig) | fields_of(SchedulerConfig, "scheduler.") | fields_of(CacheConfig, "cache.")
    assert {flag.field for flag in ENGINE_FLAGS} == fields - NOT_FLAGS.keys()


def test_every_server_setting_has_a_flag() -> None:
    assert {flag.field for flag in SERVE_FLAGS} == fields_of(ServeSettings)


def all_commands() -> list[tuple[str, Any]]:
    root = typer.main.get_command(app)
    found = []
    commands = dict(root.commands)  # type: ignore[attr-defined]
    if "conformance" in commands:  # the package that brings it has a parser of its own
        commands["conformance"] = typer.main.get_command(importlib.import_module("core_conformance.cli").app)
    for name, command in commands.items():
        for inner, sub in getattr(command, "commands", {"": command}).items():
            found.append((f"{name} {inner}".strip(), sub))
    return found


@pytest.mark.parametrize(("name", "command"), all_commands())
def test_every_command_and_flag_is_documented(name: str, command: Any) -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert f"core {name}" in text
    for parameter in command.params:
        for spelling in (*parameter.opts, *parameter.secondary_opts):
            if spelling.startswith("--") and spelling != "--help":
                assert re.search(rf"`{re.escape(spelling)}[`\s]", text), f"core {name}: {spelling}"


def test_documented_flags_exist() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    known = {o for _, command in all_commands() for p in command.params for o in (*p.opts, *p.secondary_opts)}
    for spelling in re.findall(r"`(--[a-z][a-z-]*)", text):
        assert spelling in known, spelling


def test_every_route_is_documented() -> None:
    text = (DOCS / "serving.md").read_text(encoding="utf-8")
    for method, path, _, _ in (*ROUTES, *DEV_ROUTES):
        assert f"{method} {path.replace('{name:path}', '{name}')}" in text


def test_defaults_in_help_are_those_of_the_configuration() -> None:
    help_text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"}).output
    flat = " ".join(help_text.split())
    assert "Requests that may run at once. [default: 128]" in flat
    assert "TCP port; 0 takes a free one. [default: 8000]" in flat


def test_flags_become_the_configuration() -> None:
    config = engine_config(
        "m",
        {
            "max_num_seqs": 3,
            "max_model_len": 64,
            "enable_prefix_caching": False,
            "device_memory_utilization": 0.5,
            "kv_cache_memory_bytes": "1GiB",
            "num_blocks": 99,
            "seed": None,
        },
    )
    assert config.scheduler.max_num_seqs == 3
    assert config.max_model_len == 64
    assert config.cache.enable_prefix_caching is False
    assert config.cache.device_memory_utilization == 0.5
    assert config.cache.kv_cache_memory_bytes == 2**30
    assert config.cache.num_blocks == 99
    assert config.seed == 0
    assert engine_config("m", {"max_model_len": -1}).max_model_len is None


def test_settings_from_flags() -> None:
    settings = serve_settings({"port": 1, "api_keys": ["a", "b"], "served_model_names": [], "max_body_bytes": "1M"})
    assert settings.port == 1
    assert settings.api_keys == ("a", "b")
    assert settings.served_model_names == ()
    assert settings.max_body_bytes == 10**6


@pytest.mark.parametrize(
    ("text", "size"), [("5", 5), ("5k", 5000), ("1KiB", 1024), ("1.5 GiB", 3 * 2**29), ("2T", 2 * 10**12), ("4b", 4)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "--x") == size


@pytest.mark.parametrize("text", ["", "x", "-1", "5 elephants", "1e9"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="--swap-space"):
        parse_bytes(text, "--swap-space")


@pytest.fixture
def probe() -> tuple[typer.Typer, dict[str, Any]]:
    """A command that keeps the values that it was given."""
    seen: dict[str, Any] = {}
    small = typer.Typer()

    @small.command()
    @with_flags(server=SERVE_FLAGS, engine=ENGINE_FLAGS)
    def probe(model: str, server: dict[str, Any], engine: dict[str, Any]) -> None:
        seen.update(model=model, server=server, engine=engine)

    return small, seen


def invoke(probe: tuple[typer.Typer, dict[str, Any]], *args: str) -> dict[str, Any]:
    result = CliRunner().invoke(probe[0], args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return probe[1]


def test_aliases_and_negations(probe: Any) -> None:
    seen = invoke(
        probe,
        "m",
        "--device-memory-utilization=0.4",
        "--no-enable-prefix-caching",
        "--async-scheduling",
        "--num-gpu-blocks-override=9",
        "-q",
        "int8",
        "--scheduling-policy=priority",
    )
    assert seen["engine"]["device_memory_utilization"] == 0.4
    assert seen["engine"]["enable_prefix_caching"] is False
    assert seen["engine"]["async_scheduling"] is True
    assert seen["engine"]["num_blocks"] == 9
    assert seen["engine"]["quantization"] == "int8"
    assert engine_config("m", seen["engine"]).scheduler.scheduling_policy == "priority"


def test_a_file_sets_defaults_and_the_command_line_wins(probe: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: from-file\nport: 1234\nmax-num-seqs: 5\nmax_model_len: 77\nenable-prefix-caching: false\n"
        "gpu-memory-utilization: 0.3\nserved-model-name: [a, b]\n"
    )
    seen = invoke(probe, "--config", str(file), "--max-num-seqs", "6")
    assert seen["model"] == "from-file"
    assert seen["server"]["port"] == 1234
    assert list(seen["server"]["served_model_names"]) == ["a", "b"]
    assert seen["engine"]["max_num_seqs"] == 6
    assert seen["engine"]["max_model_len"] == 77
    assert seen["engine"]["enable_prefix_caching"] is False
    assert seen["engine"]["device_memory_utilization"] == 0.3


def test_a_lone_name_in_a_file_is_one_name(probe: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("served-model-name: abc\napi-key: secret\n")
    settings = serve_settings(invoke(probe, "m", "--config", str(file))["server"])
    assert settings.served_model_names == ("abc",)
    assert settings.api_keys == ("secret",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-num-sequences: 5", "max-num-sequences"),
        ("- a\n- b", "list"),
        ("a: [", "no YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_one_clear_error(probe: Any, tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        invoke(probe, "m", "--config", str(file))

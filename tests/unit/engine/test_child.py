"""The engine's process before it is told what to serve, and the collector's part in starting fast."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys

import pytest
from byte_tokenizer import byte_tokenizer
from online import PATIENCE_S, ask
from stub_runner import FACTORY, Script

from core.engine import process
from core.engine.args import engine_config
from core.engine.async_engine import AsyncEngine
from core.engine.child import IMPORT_AHEAD, EarlyProcess, start_process
from core.engine.health import RestartPolicy
from core.engine.heap import collections_paused
from core.errors import BackendNotFoundError


def early_process(*, import_ahead: bool = False) -> EarlyProcess:
    config = engine_config(Script(env_in_resolved="STUB_SWITCH").model())
    env = {"STUB_SWITCH": "on"}
    return EarlyProcess(config, env, start_process(env, import_ahead=import_ahead))


async def test_a_process_that_was_started_ahead_becomes_the_engine() -> None:
    with early_process() as early:
        engine = await AsyncEngine.start(
            early.config, tokenizer=byte_tokenizer(), runner_factory=FACTORY, restart=False, early=early
        )
        try:
            assert engine.facts.pid == early.process.pid
            assert engine.facts.resolved == "stub on"
            assert (await ask(engine, [50])).outputs[0].finish_reason == "length"
        finally:
            await engine.shutdown()
        assert early.process.wait(timeout=10) == 0


async def test_a_restarted_engine_is_another_process_in_the_same_environment() -> None:
    with early_process() as early:
        engine = await AsyncEngine.start(
            early.config,
            tokenizer=byte_tokenizer(),
            runner_factory=FACTORY,
            restart_policy=RestartPolicy(first_delay_s=0.01),
            early=early,
        )
        try:
            early.process.kill()
            async with asyncio.timeout(PATIENCE_S):
                while engine.facts.pid == early.process.pid:
                    await asyncio.sleep(0.02)
            assert engine.facts.resolved == "stub on"
        finally:
            await engine.shutdown()


def test_a_process_that_nobody_took_ends_with_its_owner() -> None:
    with early_process(import_ahead=True) as early:
        assert early.process.poll() is None
    assert early.process.poll() is not None


def test_a_process_ends_by_itself_when_its_parent_has_gone_before_the_launch() -> None:
    early = early_process()
    assert early.process.stdin is not None
    early.process.stdin.close()
    assert early.process.wait(timeout=30) != 0


def test_no_handler_can_raise_into_an_import_which_would_take_it_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, object] = {}
    importing: list[object] = []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(process, "_import_ahead", lambda: importing.append(handlers[signal.SIGTERM]))
    monkeypatch.setattr(process, "_read_launch", lambda fd: sys.exit(7))
    monkeypatch.setattr(process, "keep_heap", lambda: None)
    monkeypatch.setattr(sys, "argv", ["engine", IMPORT_AHEAD])
    with pytest.raises(SystemExit, match="7"):
        process.main()
    assert importing == [signal.SIG_DFL]
    assert callable(handlers[signal.SIGTERM]), "it closes the device once there is one"


def test_no_process_is_started_for_a_device_that_is_not_there() -> None:
    with pytest.raises(BackendNotFoundError, match="no-such-chip"):
        EarlyProcess.start(engine_config("model", device="no-such-chip"))


def test_collections_go_on_after_a_pause_also_where_it_failed() -> None:
    enabled_inside: list[bool] = []

    def fail() -> None:
        with collections_paused():
            enabled_inside.append(gc.isenabled())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert enabled_inside == [False]
    assert gc.isenabled()


def test_a_pause_leaves_a_collector_off_that_was_off() -> None:
    gc.disable()
    try:
        with collections_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

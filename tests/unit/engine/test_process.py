"""What happens when the engine process dies, is killed, loses its parent, or has nothing to do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from online import ask, greedy, running, until, until_healthy, until_idle
from stub_runner import FACTORY, Script

from core.engine.args import engine_config
from core.engine.client import EngineClient
from core.engine.health import EngineEvent, HealthState, RestartPolicy
from core.errors import ConfigError, EngineDeadError
from core.outputs import FinishReason

SLOW = Script(step_s=0.01, max_model_len=8192, num_blocks=600)
FOREVER = greedy(None)
HERE = Path(__file__).parent


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def cpu_ticks(pid: int) -> int:
    """Clock ticks of processor time that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_a_killed_engine_loses_its_requests_at_once_and_comes_back() -> None:
    events: list[EngineEvent] = []
    async with running(SLOW, on_event=events.append) as engine:
        pid = engine.facts.pid
        tasks = [asyncio.create_task(ask(engine, [50 + i], greedy(None, n=1 + i % 2))) for i in range(16)]
        await until(lambda: engine.stats().num_requests_running == 24, "all running")
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - killed < 2.0
        assert {type(result) for result in results} == {EngineDeadError}
        assert "SIGKILL" in str(results[0])
        assert engine.health.state is HealthState.RESTARTING
        assert "SIGKILL" in engine.health.reason
        assert engine.errored
        assert engine.stats().num_requests_running == 0
        with pytest.raises(EngineDeadError, match="starting again"):
            await ask(engine, [50])
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()
        await until_healthy(engine)
        assert engine.facts.pid != pid
        assert (await ask(engine, [50])).outputs[0].token_ids == [11, 12, 13, 14]
        await until_idle(engine)
    assert [event.kind for event in events] == ["started", "died", "started"]


async def test_a_runner_that_declares_itself_dead_ends_the_process_with_its_reason() -> None:
    script = Script(die_on=70, step_s=0.001)
    async with running(script) as engine:
        with pytest.raises(EngineDeadError, match="fell off the bus"):
            await ask(engine, [70])
        await until_healthy(engine)
        assert len((await ask(engine, [50])).outputs[0].token_ids) == 4


async def test_a_step_that_raises_costs_only_its_requests() -> None:
    async with running(Script(raise_on=71, step_s=0.001)) as engine:
        pid = engine.facts.pid
        choice = (await ask(engine, [71])).outputs[0]
        assert choice.finish_reason is FinishReason.ERROR
        assert "a kernel failed" in (choice.error or "")
        assert len((await ask(engine, [50])).outputs[0].token_ids) == 4
        assert engine.facts.pid == pid
        await until_idle(engine)


async def test_without_restarts_a_dead_engine_stays_dead() -> None:
    async with running(Script(kill_on=70), restart=False) as engine:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await ask(engine, [70])
        await until(lambda: engine.health.state is HealthState.DEAD, "dead")
        with pytest.raises(EngineDeadError, match=r"is dead.*SIGKILL"):
            await ask(engine, [50])


async def test_a_crash_loop_ends() -> None:
    events: list[EngineEvent] = []
    policy = RestartPolicy(max_restarts=2, first_delay_s=0.01)
    async with running(Script(kill_on=70), policy=policy, on_event=events.append) as engine:
        for _ in range(3):
            await until_healthy(engine)
            with pytest.raises(EngineDeadError):
                await ask(engine, [70])
        await until(lambda: engine.health.state is HealthState.DEAD, "dead")
    assert [event.kind for event in events] == ["started", "died"] * 3 + ["gave_up"]


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    events: list[EngineEvent] = []
    async with running(Script(kill_on=70, broken_while=str(broken)), on_event=events.append) as engine:
        broken.touch()
        with pytest.raises(EngineDeadError):
            await ask(engine, [70])
        await until(lambda: events[-1].kind == "restart_failed", "failed to restart")
        assert "broken while" in engine.health.reason
        broken.unlink()
        await until_healthy(engine)
        assert len((await ask(engine, [50])).outputs[0].token_ids) == 4


async def test_an_interrupt_from_the_terminal_does_not_reach_the_engine() -> None:
    async with running(SLOW) as engine:
        pid = engine.facts.pid
        assert os.getpgid(pid) != os.getpgid(0)
        os.kill(pid, signal.SIGINT)
        assert len((await ask(engine, [50])).outputs[0].token_ids) == 4
        assert engine.facts.pid == pid


async def test_an_idle_engine_uses_no_processor_time() -> None:
    async with running(SLOW) as engine:
        await ask(engine, [50])
        await until_idle(engine)
        before = cpu_ticks(engine.facts.pid)
        await asyncio.sleep(0.5)
        assert cpu_ticks(engine.facts.pid) - before <= 2


async def test_a_shutdown_leaves_neither_process_nor_files() -> None:
    async with running(SLOW) as engine:
        client = engine._supervisor._client
        assert client is not None
        pid, folder = engine.facts.pid, client._folder
        assert os.stat(folder).st_mode & 0o077 == 0
        assert is_alive(pid)
    assert not is_alive(pid)
    assert not os.path.exists(folder)


async def test_the_environment_is_there_before_the_engine_is_built() -> None:
    config = engine_config(Script(env_in_resolved="STUB_SWITCH").model())
    client, ready = await EngineClient.launch(config, runner_factory=FACTORY, env={"STUB_SWITCH": "on"})
    assert ready.facts.resolved == "stub on"
    assert await client.stop(5.0) == 0


async def test_a_factory_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        await EngineClient.launch(engine_config("{}"), runner_factory="no_such_module:make")


async def test_an_engine_that_takes_too_long_to_load_is_given_up() -> None:
    config = engine_config(Script(load_s=20.0).model())
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"not ready after 0\.5 s"):
        await EngineClient.launch(config, runner_factory=FACTORY, ready_timeout_s=0.5)
    assert time.monotonic() - begin < 5.0


PARENT = """
import asyncio, sys
sys.path[:0] = sys.argv[1:]
from online import running, greedy
from stub_runner import Script

async def main():
    async with running(Script(step_s=0.01)) as engine:
        stream = engine.generate([50], greedy(None))
        await anext(stream)
        print(engine.facts.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_an_engine_does_not_outlive_its_parent() -> None:
    paths = [str(HERE), str(HERE.parents[2])]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *paths], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5.0
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_a_process_started_by_hand_says_how_it_should_be() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from core.engine.process import main; main()"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode != 0
    assert "core serve" in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_stopped_engine_is_unresponsive_and_goes_on_when_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.supervisor.LISTEN_S", 0.1)
    policy = RestartPolicy(first_delay_s=0.01, silence_limit_s=4.0)
    async with running(SLOW, policy=policy) as engine:
        task = asyncio.create_task(ask(engine, [50], greedy(200)))
        await until(lambda: engine.stats().num_requests_running == 1, "running")
        os.kill(engine.facts.pid, signal.SIGSTOP)
        await until(lambda: engine.health.state is HealthState.UNRESPONSIVE, "unresponsive")
        assert "no sign of life" in engine.health.reason
        os.kill(engine.facts.pid, signal.SIGCONT)
        assert len((await task).outputs[0].token_ids) == 200
        assert engine.health.state is HealthState.HEALTHY


async def test_an_engine_that_stays_silent_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.supervisor.LISTEN_S", 0.1)
    policy = RestartPolicy(first_delay_s=0.01, silence_limit_s=3.0, kill_silent_after_s=4.0)
    async with running(SLOW, policy=policy) as engine:
        pid = engine.facts.pid
        task = asyncio.create_task(ask(engine, [50], FOREVER))
        await until(lambda: engine.stats().num_requests_running == 1, "running")
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="no sign of life"):
            await task
        await until_healthy(engine)
        assert not is_alive(pid)
        assert len((await ask(engine, [50])).outputs[0].token_ids) == 4


async def test_an_idle_engine_and_one_in_a_long_step_are_not_unresponsive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.supervisor.LISTEN_S", 0.1)
    policy = RestartPolicy(first_delay_s=0.01, silence_limit_s=4.0, kill_silent_after_s=4.0)
    async with running(Script(step_s=4.5), policy=policy) as engine:
        pid = engine.facts.pid
        await asyncio.sleep(4.5)
        assert engine.health.state is HealthState.HEALTHY
        await ask(engine, [50], greedy(1))
        assert (engine.facts.pid, engine.health.state) == (pid, HealthState.HEALTHY)

"""Requests through the engine in its own process: streams, aborts, refusals, labels, draining."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from online import ask, greedy, running, until, until_idle
from stub_runner import Script

from core.errors import EngineDeadError, InvalidRequestError, ModelLoadError, QueueFullError
from core.outputs import FinishReason
from core.sampling_params import SamplingParams

PIECES = {1: b"ob ", 2: bytes.fromhex("f09f"), 3: bytes.fromhex("988a"), 4: b" ke", 5: b"one", 6: b"two"}
SCRIPT = Script(outputs={"50": [1, 2, 3, 4], "51": [5], "52": [6]}, step_s=0.001)
SLOW = Script(step_s=0.01, max_model_len=8192, num_blocks=600)
FOREVER = greedy(None)


async def test_facts_say_what_is_served() -> None:
    async with running(SCRIPT, max_model_len=100, max_num_seqs=3) as engine:
        facts = engine.facts
        assert (facts.vocab_size, facts.max_model_len, facts.dtype) == (1000, 100, "float32")
        assert (facts.num_blocks, facts.block_size, facts.architecture) == (64, 16, "StubForCausalLM")
        assert facts.resolved.startswith("stub")
        assert str(engine.health.state) == "healthy"
        assert not engine.errored


async def test_deltas_join_to_the_whole_text() -> None:
    """H001: a character over two tokens, streamed and not."""
    async with running(SCRIPT, pieces=PIECES) as engine:
        deltas = [output.outputs[0].text async for output in engine.generate([50], greedy(4))]
        assert "".join(deltas) == "ob 😊 ke"
        assert not any("�" in delta for delta in deltas)
        assert (await ask(engine, [50])).outputs[0].text == "ob 😊 ke"
        cut = [output.outputs[0].text async for output in engine.generate([50], greedy(2))]
        assert "".join(cut) == "ob �" == (await ask(engine, [50], greedy(2))).outputs[0].text


async def test_each_choice_of_a_stream_ends_once() -> None:
    """H008."""
    async with running(SCRIPT) as engine:
        finishes: list[int] = []
        num_tokens = 0
        params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
        async for output in engine.generate([55] * 5, params):
            num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
            finishes += [choice.index for choice in output.outputs if choice.finish_reason is not None]
            assert output.finished is (len(finishes) == 3)
        assert (sorted(finishes), num_tokens, len(output.prompt_token_ids)) == ([0, 1, 2], 12, 5)
        await until_idle(engine)


async def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    """H004, over the process boundary."""
    async with running(SLOW, pieces={11: b"DEF", 12: b"GHI"}) as engine:
        output = await ask(engine, [50], SamplingParams(temperature=0.0, stop=("FG",), max_tokens=2000))
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("DE", [11, 12])
        stats = await until_idle(engine)
        assert stats.num_steps < 10


@pytest.mark.parametrize("params", [FOREVER, greedy(None, n=2)], ids=["n=1", "n=2"])
async def test_closing_a_stream_ends_every_choice(params: SamplingParams) -> None:
    """H035: the client goes away after the first chunk; then the same id is aborted again."""
    async with running(SLOW) as engine:
        free_before = engine.stats().num_free_blocks
        stream = engine.generate([50] * 20, params, "label")
        await anext(stream)
        closed = time.monotonic()
        await stream.aclose()
        stats = await until_idle(engine)
        assert time.monotonic() - closed < 2.0
        assert stats.num_free_blocks == free_before
        await asyncio.sleep(0.1)
        assert engine.stats().num_steps == stats.num_steps
        await engine.abort("label")
        await engine.check_integrity()


async def test_cancelling_a_task_ends_its_request() -> None:
    """H035, without streaming."""
    async with running(SLOW) as engine:
        task = asyncio.create_task(ask(engine, [50], FOREVER))
        await until(lambda: engine.stats().num_requests_running == 1, "running")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)


async def test_a_request_that_is_still_queued_can_go_away() -> None:
    """H035: the client is gone while it waits behind another."""
    async with running(SLOW, max_num_seqs=1) as engine:
        first = engine.generate([50], FOREVER)
        await anext(first)
        queued = asyncio.create_task(ask(engine, [51], FOREVER))
        await until(lambda: engine.stats().num_requests_waiting == 1, "waiting")
        queued.cancel()
        await until(lambda: engine.stats().num_requests_waiting == 0, "gone from the queue")
        assert engine.stats().num_requests_running == 1
        await first.aclose()
        await until_idle(engine)


async def test_an_abort_ends_the_stream_with_its_reason() -> None:
    async with running(SLOW) as engine:
        stream = engine.generate([50], greedy(None, n=2), "label")
        await anext(stream)
        await engine.abort("label")
        rest = [output async for output in stream]
        assert rest[-1].finished
        ends = [choice.finish_reason for output in rest for choice in output.outputs if choice.finish_reason]
        assert ends == [FinishReason.ABORT] * 2
        await engine.abort("label")
        await engine.abort("never heard of")
        await until_idle(engine)


async def test_two_requests_may_share_a_label() -> None:
    """H036: each gets its own text, and the label can be used again right after an abort."""
    async with running(SCRIPT, pieces=PIECES) as engine:
        one, two = await asyncio.gather(
            ask(engine, [51], greedy(20), request_id="id"), ask(engine, [52], greedy(20), request_id="id")
        )
        assert (one.outputs[0].text, two.outputs[0].text) == ("one" * 20, "two" * 20)
        assert one.request_id == two.request_id == "id"
        stream = engine.generate([51], FOREVER, "id")
        await anext(stream)
        await engine.abort("id")
        again = await ask(engine, [52], greedy(2), request_id="id")
        assert again.outputs[0].text == "twotwo"
        await stream.aclose()
        with pytest.raises(InvalidRequestError, match="1048576 characters"):
            await ask(engine, [51], request_id="x" * 2**20)
        await until_idle(engine)


async def test_wrong_requests_are_refused_and_the_process_lives() -> None:
    """H012 and H013 through the engine: the process is the same before and after."""
    async with running(SCRIPT, max_model_len=64) as engine:
        pid = engine.facts.pid
        for prompt, params, param in (
            ([-1], greedy(), "prompt"),
            ([5, 1000], greedy(), "prompt"),
            ([5], greedy(logit_bias={1000: 5.0}), "logit_bias"),
            ([5], greedy(stop_token_ids=(1000,), min_tokens=1), "stop_token_ids"),
            ([5], greedy(allowed_token_ids=(1000,)), "allowed_token_ids"),
            ([5], greedy(logprobs=2_000_000_000), "logprobs"),
            ([5] * 65, greedy(1), "prompt"),
            ([5] * 60, greedy(10), "max_tokens"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await ask(engine, prompt, params)
            assert caught.value.param == param
        assert len((await ask(engine, [5] * 60, greedy(None))).outputs[0].token_ids) == 4
        assert engine.facts.pid == pid
        await until_idle(engine)


async def test_a_full_queue_is_told_at_once() -> None:
    async with running(SLOW, max_num_seqs=1, max_num_queued_reqs=1) as engine:
        first = engine.generate([50], FOREVER)
        await anext(first)
        second = asyncio.create_task(ask(engine, [51], FOREVER))
        await until(lambda: engine.stats().num_requests_waiting == 1, "waiting")
        begin = time.monotonic()
        with pytest.raises(QueueFullError, match="1 requests wait"):
            await ask(engine, [52], FOREVER)
        assert time.monotonic() - begin < 1.0
        second.cancel()
        await first.aclose()
        await until_idle(engine)


async def test_a_queue_with_room_for_some_choices_takes_none() -> None:
    async with running(SLOW, max_num_seqs=1, max_num_queued_reqs=2) as engine:
        first = engine.generate([50], FOREVER)
        await anext(first)
        with pytest.raises(QueueFullError):
            await ask(engine, [51], greedy(4, n=3))
        assert engine.stats().num_requests_waiting == 0
        await first.aclose()
        await until_idle(engine)


async def test_draining_lets_requests_end_and_takes_no_new_ones() -> None:
    async with running(SCRIPT) as engine:
        task = asyncio.create_task(ask(engine, [51], greedy(50)))
        await until(lambda: engine.stats().num_requests_running == 1, "running")
        draining = asyncio.create_task(engine.drain(5.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await ask(engine, [52])
        assert await draining
        assert len((await task).outputs[0].token_ids) == 50


async def test_draining_aborts_what_does_not_end_in_time() -> None:
    async with running(SLOW) as engine:
        task = asyncio.create_task(ask(engine, [51], FOREVER))
        await until(lambda: engine.stats().num_requests_running == 1, "running")
        assert not await engine.drain(0.05)
        assert (await task).outputs[0].finish_reason is FinishReason.ABORT
        await until_idle(engine)


async def test_a_shutdown_ends_requests_in_flight_with_an_error() -> None:
    async with running(SLOW) as engine:
        task = asyncio.create_task(ask(engine, [51], FOREVER))
        await until(lambda: engine.stats().num_requests_running == 1, "running")
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        assert str(engine.health.state) == "dead"
        await engine.shutdown()


async def test_an_error_at_load_arrives_as_it_was() -> None:
    with pytest.raises(ModelLoadError, match="shard 2 is missing; pull it again"):
        async with running(Script(load_error="shard 2 is missing; pull it again")):
            pass


async def test_a_process_that_ends_while_loading_is_told() -> None:
    with pytest.raises(EngineDeadError, match=r"could not start.*exit code 7"):
        async with running(Script(exit_at_load=7)):
            pass


async def test_many_streams_with_random_aborts_leak_nothing() -> None:
    """64 streams in a pool too small for all of them, closed or aborted at random, some by stop strings."""
    chance = random.Random(7)
    script = Script(num_blocks=40, block_size=4, step_s=0.0005)

    async def one(index: int) -> None:
        params = SamplingParams(
            n=1 + index % 2, seed=index, max_tokens=chance.randint(1, 60), stop=("<19>",) if index % 3 == 0 else ()
        )
        stream = engine.generate([40 + index % 9] * chance.randint(1, 30), params, str(index))
        patience = chance.randint(1, 40)
        async for output in stream:
            patience -= 1
            if patience == 0 and not output.finished:
                await (engine.abort(str(index)) if index % 2 else stream.aclose())

    async with running(script, max_num_batched_tokens=64, max_num_seqs=16) as engine:
        await asyncio.gather(*(one(index) for index in range(64)))
        stats = await until_idle(engine)
        assert stats.num_preemptions > 0
        assert len(engine._streams) == len(engine._outputs) == 0
        assert (await ask(engine, [50], greedy(3))).outputs[0].token_ids == [11, 12, 13]

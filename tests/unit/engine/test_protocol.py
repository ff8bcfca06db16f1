"""Messages between the two processes survive the way there and back."""

from __future__ import annotations

import msgspec
import pytest

import core.errors
from core.config import EngineConfig, SchedulerConfig
from core.engine import protocol
from core.errors import ContextLengthError, CoreError, InvalidRequestError, QueueFullError, UnsupportedError
from core.outputs import EngineOutput, EngineStats, FinishReason, PositionLogprobs
from core.request import EngineRequest
from core.sampling_params import SamplingParams

FACTS = protocol.EngineFacts(
    model="m",
    architecture="A",
    vocab_size=10,
    max_model_len=20,
    dtype="float32",
    device="auto",
    resolved="stub",
    num_blocks=4,
    block_size=16,
)
REQUEST = EngineRequest(
    request_id="k-0",
    prompt_token_ids=[1, 2, 3],
    sampling_params=SamplingParams(
        temperature=0.5, logit_bias={7: -3.5}, seed=2**64 - 1, stop=("a", "é"), bad_words_token_ids=((1, 2), (3,))
    ),
    cache_salt="s",
)
OUTPUT = EngineOutput(
    request_id="k-0",
    new_token_ids=(5,),
    new_logprobs=(PositionLogprobs((5, 1), (-0.25, -2.0), 1),),
    prompt_logprobs=(None, PositionLogprobs((2,), (-1.0,), 3)),
    finish_reason=FinishReason.STOP,
    stop_reason="x",
)


@pytest.mark.parametrize(
    "message",
    [protocol.Add([REQUEST]), protocol.Abort(["k-0"]), protocol.Call(3, "check_integrity"), protocol.Shutdown()],
    ids=lambda message: type(message).__name__,
)
def test_messages_to_the_engine_round_trip(message: protocol.ToEngine) -> None:
    assert protocol.decode_to_engine(protocol.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        protocol.Ready(FACTS, EngineStats(num_blocks=3)),
        protocol.Failed(protocol.WireError.of(ValueError("v")), 2),
        protocol.Outputs([OUTPUT], EngineStats(num_requests_running=1, kv_cache_usage=0.5)),
        protocol.Rejected(["k-0"], protocol.WireError.of(QueueFullError("full", retry_after_s=3))),
        protocol.Reply(3),
        protocol.Dying("because"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_from_the_engine_round_trip(message: protocol.FromEngine) -> None:
    assert protocol.decode_from_engine(protocol.encode(message)) == message


def test_a_launch_message_round_trips_with_its_configuration() -> None:
    config = EngineConfig(model="m", scheduler=SchedulerConfig(max_num_seqs=3, async_scheduling=False))
    launch = protocol.Launch(config=config, inbox="ipc://a", outbox="ipc://b", runner_factory="a:b")
    assert protocol.decode_launch(protocol.encode(launch)) == launch


@pytest.mark.parametrize("name", core.errors.__all__)
def test_every_error_of_the_tree_arrives_with_class_message_and_exit_code(name: str) -> None:
    kind = getattr(core.errors, name)
    error = kind("sample", "no kernel") if kind is UnsupportedError else kind("what was wrong")
    back = _over_the_wire(error)
    assert type(back) is kind
    assert str(back) == str(error)
    assert back.exit_code == error.exit_code
    assert vars(back) == vars(error)


def test_attributes_of_an_error_arrive() -> None:
    context = _over_the_wire(ContextLengthError("too long", param="prompt"))
    assert isinstance(context, InvalidRequestError)
    assert (context.message, context.param, context.code) == ("too long", "prompt", "context_length_exceeded")
    full = _over_the_wire(QueueFullError("full", retry_after_s=7))
    assert isinstance(full, QueueFullError)
    assert full.retry_after_s == 7


def test_an_unexpected_exception_arrives_as_a_core_error_that_names_it() -> None:
    back = _over_the_wire(ZeroDivisionError("by zero"))
    assert type(back) is CoreError
    assert "ZeroDivisionError" in str(back)


def _over_the_wire(error: Exception) -> CoreError:
    data = msgspec.msgpack.encode(protocol.WireError.of(error))
    return msgspec.msgpack.decode(data, type=protocol.WireError).error()

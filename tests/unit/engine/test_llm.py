"""Whole requests through input processor, engine, real scheduler and output processor, over a stub runner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from offline import StubLLM
from stub_runner import Script

from core.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError, TemplateError
from core.outputs import FinishReason
from core.sampling_params import SamplingParams

PIECES = {
    1: b"ob ",
    2: bytes.fromhex("f09f"),
    3: bytes.fromhex("988a"),
    4: b" ke",
    5: b"Hello world ",
    6: bytes.fromhex("f09f8c"),
    7: b"\xb6",
    8: b" x",
    20: b"DEF",
    21: b"GHI",
    22: b"x DEF",
    23: b" is",
    24: b" Paris",
    25: b".",
}
SCRIPT = Script(
    outputs={
        "50": [1, 2, 3, 4],
        "5,6": [7, 8],
        "51": [2, 23, 3, 24],
        "52": [20, 21],
        "53": [22, 21],
        "54": [23, 24, 25],
        "60": [11, 12, 900, 13, 902, 14, 15, 16],
        "61,61,61": [902],
        "62": [999],
    },
    refuse_on=70,
    raise_on=71,
    die_on=72,
)
EOS = (902, 900)


@pytest.fixture(params=["async", "sync"])
def llm(request: pytest.FixtureRequest) -> Iterator[StubLLM]:
    with StubLLM(SCRIPT, PIECES, eos=EOS, async_scheduling=request.param == "async") as llm:
        yield llm
        if not llm.runner.closed:
            llm.check_idle()


@pytest.mark.parametrize(("max_tokens", "text"), [(4, "ob 😊 ke"), (2, "ob �")])
def test_a_character_may_span_tokens(llm: StubLLM, max_tokens: int, text: str) -> None:
    """H001."""
    assert llm.ask([50], max_tokens=max_tokens).outputs[0].text == text


def test_half_a_character_at_the_end_of_the_prompt_does_not_leak_it(llm: StubLLM) -> None:
    """H002."""
    text = llm.ask([5, 6], max_tokens=2).outputs[0].text
    assert text in ("🌶 x", " x")


def test_invalid_bytes_are_replaced_and_take_no_other_request_with_them(llm: StubLLM) -> None:
    """H003."""
    params = SamplingParams(temperature=0.0, max_tokens=4)
    odd, plain = llm.generate([{"prompt_token_ids": [51]}, {"prompt_token_ids": [50]}], params, use_tqdm=False)
    assert odd.outputs[0].text == llm.get_tokenizer().decode(odd.outputs[0].token_ids)
    assert "�" in odd.outputs[0].text
    assert (plain.outputs[0].text, plain.outputs[0].finish_reason) == ("ob 😊 ke", FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("prompt", "stop", "include", "text", "num_tokens"),
    [(52, "DE", False, "", 1), (53, "DE", False, "x ", 1), (54, "Pari", False, " is ", 2), (53, "DE", True, "x DE", 1)],
)
def test_a_stop_string_ends_a_request_in_the_engine(
    llm: StubLLM, prompt: int, stop: str, include: bool, text: str, num_tokens: int
) -> None:
    """H004: the engine runs at most the steps that were on their way when the string was seen."""
    output = llm.ask([prompt], stop=(stop,), include_stop_str_in_output=include, max_tokens=1000)
    choice = output.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, FinishReason.STOP, stop)
    assert len(choice.token_ids) == num_tokens
    assert llm.get_metrics().num_steps <= num_tokens + 1


def test_min_tokens_counts_output_tokens_before_eos(llm: StubLLM) -> None:
    """H005 a."""
    choice = llm.ask([61, 61, 61], max_tokens=32, min_tokens=4).outputs[0]
    assert (len(choice.token_ids), choice.token_ids[-1], choice.finish_reason) == (5, 902, FinishReason.STOP)
    assert 902 not in choice.token_ids[:-1]


def test_min_tokens_equal_to_max_tokens_after_a_long_prompt(llm: StubLLM) -> None:
    """H005 b: the prompt does not count."""
    choice = llm.ask([9] * 200, max_tokens=200, min_tokens=200, ignore_eos=True).outputs[0]
    assert (len(choice.token_ids), choice.finish_reason) == (200, FinishReason.LENGTH)


def test_the_last_id_of_the_vocabulary_is_said_under_min_tokens(llm: StubLLM) -> None:
    """H005 c."""
    choice = llm.ask([62], max_tokens=3, min_tokens=3, ignore_eos=True).outputs[0]
    assert choice.token_ids == [999] * 3


@pytest.mark.parametrize(
    ("stop_token_ids", "num_tokens", "reason", "stop_reason"),
    [((), 8, FinishReason.LENGTH, None), ((13,), 4, FinishReason.STOP, 13)],
)
def test_ignore_eos_covers_every_eos_id_and_no_stop_id(
    llm: StubLLM, stop_token_ids: tuple[int, ...], num_tokens: int, reason: FinishReason, stop_reason: int | None
) -> None:
    """H006."""
    choice = llm.ask([60], max_tokens=8, ignore_eos=True, stop_token_ids=stop_token_ids).outputs[0]
    assert (len(choice.token_ids), choice.finish_reason, choice.stop_reason) == (num_tokens, reason, stop_reason)


def test_without_ignore_eos_the_first_eos_id_ends_the_text(llm: StubLLM) -> None:
    choice = llm.ask([60], max_tokens=8).outputs[0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([11, 12, 900], FinishReason.STOP, None)
    assert choice.text == "<11><12>"


def test_n_choices_come_in_one_output(llm: StubLLM) -> None:
    """H008: n finishes, n times the tokens, one prompt."""
    output = llm.ask([55] * 5, n=3, max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert [choice.finish_reason for choice in output.outputs] == [FinishReason.LENGTH] * 3
    assert sum(len(choice.token_ids) for choice in output.outputs) == 12
    assert len(output.prompt_token_ids) == 5


def test_logprobs_have_one_entry_a_token(llm: StubLLM) -> None:
    """H010 b: nine entries for nine prompt tokens, the first null, each with the actual token first."""
    prompt = [80, 81, 82, 83, 84, 85, 86, 87, 88]
    output = llm.ask(prompt, max_tokens=1, prompt_logprobs=1, logprobs=2)
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert (first, [entry.token_ids[0] for entry in rest if entry is not None]) == (None, prompt[1:])
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert [entry.token_ids[0] for entry in choice.logprobs] == choice.token_ids
    assert len(choice.logprobs[0].token_ids) == 3
    assert choice.cumulative_logprob == choice.logprobs[0].logprobs[0]


def test_a_scoring_request_generates_nothing(llm: StubLLM) -> None:
    """H011, and an ordinary request after it."""
    output = llm.ask([80, 81, 82], max_tokens=0, prompt_logprobs=1)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], FinishReason.LENGTH)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 3
    assert llm.ask([50], max_tokens=4).outputs[0].text == "ob 😊 ke"


def test_what_does_not_fit_is_refused_and_what_follows_runs() -> None:
    """H012, all five steps on one engine."""
    with StubLLM(SCRIPT, PIECES, max_model_len=64) as llm:
        for num_prompt, max_tokens, fits in ((65, 1, 0), (8, 4, 4), (60, 10, 0), (60, None, 4), (64, 1, 0)):
            if fits:
                choice = llm.ask([80] * num_prompt, max_tokens=max_tokens, ignore_eos=True).outputs[0]
                assert (len(choice.token_ids), choice.finish_reason) == (fits, FinishReason.LENGTH)
            else:
                with pytest.raises(ContextLengthError, match=rf"{num_prompt} tokens.*\b64\b"):
                    llm.ask([80] * num_prompt, max_tokens=max_tokens)
        llm.check_idle()


def test_a_prompt_larger_than_the_pool_is_refused_at_once() -> None:
    """H037: the message has both numbers, and the next request does not wait behind it."""
    with StubLLM(Script(num_blocks=9, block_size=16), max_model_len=4096) as llm:
        with pytest.raises(ContextLengthError, match=r"200 tokens.*128"):
            llm.ask([80] * 200, max_tokens=1)
        assert len(llm.ask([80] * 20, max_tokens=5).outputs[0].token_ids) == 5
        llm.check_idle()


def test_one_wrong_prompt_of_many_runs_none(llm: StubLLM) -> None:
    with pytest.raises(InvalidRequestError, match="1000"):
        llm.generate([{"prompt_token_ids": [50]}, {"prompt_token_ids": [1000]}], use_tqdm=False)
    assert llm.get_metrics().num_steps == 0


def test_a_request_that_the_sampler_refuses_ends_with_its_reason(llm: StubLLM) -> None:
    bad, good = llm.generate([{"prompt_token_ids": [70]}, {"prompt_token_ids": [50]}], use_tqdm=False)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].error) == (FinishReason.ERROR, "every candidate is masked")
    assert good.outputs[0].finish_reason is FinishReason.LENGTH


def test_a_step_that_raises_costs_its_requests_and_no_more(llm: StubLLM) -> None:
    output = llm.ask([71], max_tokens=4)
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert "a kernel failed" in (output.outputs[0].error or "")
    assert llm.ask([50], max_tokens=4).outputs[0].text == "ob 😊 ke"


def test_a_runner_that_is_dead_raises(llm: StubLLM) -> None:
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        llm.ask([72], max_tokens=4)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.ask([50])


def test_steps_overlap_only_with_asynchronous_scheduling() -> None:
    for asynchronous, depth in ((True, 2), (False, 1)):
        with StubLLM(Script(step_s=0.002), async_scheduling=asynchronous) as llm:
            llm.ask([50], max_tokens=20)
            assert llm.runner.max_in_flight == depth


def test_asynchronous_and_synchronous_scheduling_say_the_same() -> None:
    prompts: list[Any] = [{"prompt_token_ids": [80 + i] * (1 + 7 * i)} for i in range(12)]
    params = [SamplingParams(temperature=0.0, max_tokens=3 + i) for i in range(12)]
    answers = []
    for asynchronous in (True, False):
        small = Script(num_blocks=24, block_size=4)
        with StubLLM(small, async_scheduling=asynchronous, max_num_batched_tokens=16, max_num_seqs=5) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            llm.check_idle()
    assert answers[0] == answers[1]
    assert [len(ids) for ids in answers[0]] == [3 + i for i in range(12)]


def test_outputs_keep_the_order_of_prompts(llm: StubLLM) -> None:
    texts = ["a", "bb", "ccc"]
    lengths = [SamplingParams(max_tokens=max_tokens) for max_tokens in (9, 2, 5)]
    outputs = llm.generate(texts, lengths, use_tqdm=False)
    assert [output.prompt for output in outputs] == texts
    assert [output.prompt_token_ids for output in outputs] == [llm.encode(text) for text in texts]
    assert all(output.finished for output in outputs)


def test_a_list_of_ids_is_one_prompt(llm: StubLLM) -> None:
    assert [output.prompt_token_ids for output in llm.generate([50, 51], use_tqdm=False)] == [[50, 51]]
    assert llm.generate([], use_tqdm=False) == []


def test_lists_of_unequal_length_are_refused(llm: StubLLM) -> None:
    with pytest.raises(InvalidRequestError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="1 priorities for 2 prompts"):
        llm.generate(["a", "b"], priority=[1], use_tqdm=False)


def test_the_window_is_what_the_pool_holds_where_nobody_asked_for_more() -> None:
    with StubLLM(Script(num_blocks=9, block_size=16, max_model_len=4096)) as llm:
        assert llm.facts.max_model_len == 128
    with pytest.raises(ConfigError, match=r"--max-model-len 5000.*4096"):
        StubLLM(Script(), max_model_len=5000)


def test_importing_the_package_brings_no_torch() -> None:
    code = "import sys, core; core.SamplingParams; core.RequestOutput; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_a_chat_is_rendered_and_answered(llm: StubLLM) -> None:
    """One conversation or several; `prompt` is what the template wrote."""
    turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}[a]{% endif %}"
    params = SamplingParams(max_tokens=2)
    hello = [{"role": "u", "content": "hello"}]
    (one,) = llm.chat(hello, params, chat_template=template, use_tqdm=False)
    assert (one.prompt, one.prompt_token_ids) == ("[u] hello\n[a]", llm.encode("[u] hello\n[a]"))
    several = llm.chat(
        [hello, [*hello, {"role": "a", "content": "hi"}]], params, chat_template=template, use_tqdm=False
    )
    assert [output.prompt for output in several] == ["[u] hello\n[a]", "[u] hello\n[a] hi\n[a]"]
    assert all(len(output.outputs[0].token_ids) == 2 for output in several)


@pytest.mark.parametrize("name", ["messages", "tools", "continue_final_message"])
def test_a_template_variable_cannot_take_the_place_of_an_argument(llm: StubLLM, name: str) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    with pytest.raises(InvalidRequestError, match=name):
        llm.chat(conversation, chat_template="{}", chat_template_kwargs={name: []}, use_tqdm=False)


def test_a_model_without_a_template_cannot_chat(llm: StubLLM) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [None], [1.5], b"hi", [b"hi"], [[True]], [["a"]], {"x": 1}, {"prompt_token_ids": None}, {"prompt": 5}],
)
def test_what_is_no_prompt_is_refused_by_name(llm: StubLLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt") as caught:
        llm.ask(prompt)
    assert caught.value.param == "prompt"
    assert llm.ask([50], max_tokens=1).outputs[0].token_ids == [1]


def test_prompts_come_as_text_objects_or_from_an_iterator(llm: StubLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    texts = ["ab", {"prompt": "ab"}]
    outputs = llm.generate((text for text in texts), params, use_tqdm=False)  # type: ignore[arg-type]
    assert [output.prompt for output in outputs] == ["ab", "ab"]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [None], 5])
def test_what_are_no_sampling_params_is_refused(llm: StubLLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        llm.generate([[50]], params, use_tqdm=False)


def test_a_priority_without_effect_is_refused(llm: StubLLM) -> None:
    with pytest.raises(InvalidRequestError, match="scheduling_policy"):
        llm.generate([[50]], priority=[1], use_tqdm=False)
    assert len(llm.generate([[50]], SamplingParams(max_tokens=1), priority=[0], use_tqdm=False)) == 1

"""What a user of the `openai` package does: `python openai_client.py URL MODEL QUESTION ANSWER`.

Runs with any release of the package from 2.0 on; ends with exit code 0 where every answer was right.
"""

from __future__ import annotations

import asyncio
import sys

import openai

COUNTING, GOES_ON = "1, 2, 3, 4, 5,", " 6, 7, 8"


def check_models(client: openai.OpenAI, model: str) -> None:
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def check_chat(client: openai.OpenAI, model: str, question: str, answer: str) -> None:
    messages = [{"role": "user", "content": question}]
    args = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**args)
    [choice] = whole.choices
    assert answer in choice.message.content, choice
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage.completion_tokens <= 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    chunks = list(client.chat.completions.create(**args, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == choice.message.content
    assert sum(text != "" for text in texts) > 1, "the answer came in one piece"
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert ends == [choice.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens <= whole.usage.prompt_tokens


def check_logprobs(client: openai.OpenAI, model: str, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    args = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 6, "logprobs": True}
    [choice] = client.chat.completions.create(**args, top_logprobs=3).choices
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content)
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        assert entry.token == entry.top_logprobs[0].token
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
    legacy = client.completions.create(model=model, prompt=COUNTING, max_tokens=4, temperature=0, logprobs=2)
    logprobs = legacy.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    assert "".join(logprobs.tokens) == legacy.choices[0].text


def check_choices(client: openai.OpenAI, model: str, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    args = {"model": model, "messages": messages, "n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 8}
    args["extra_body"] = {"top_k": 50, "ignore_eos": True}
    whole = client.chat.completions.create(**args)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 24
    assert len({choice.message.content for choice in whole.choices}) > 1
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**args, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


def check_completions(client: openai.OpenAI, model: str) -> None:
    args = {"model": model, "prompt": COUNTING, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**args)
    assert whole.choices[0].text.startswith(GOES_ON), whole
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    parts = [chunk.choices[0].text for chunk in client.completions.create(**args, stream=True)]
    assert "".join(parts) == whole.choices[0].text
    stopped = client.completions.create(**{**args, "stop": [" 8", "x"]})
    assert stopped.choices[0].text == " 6, 7,"
    assert stopped.choices[0].finish_reason == "stop"
    several = client.completions.create(**{**args, "prompt": [COUNTING, COUNTING]})
    assert [choice.text for choice in several.choices] == [whole.choices[0].text] * 2


def check_errors(client: openai.OpenAI, model: str) -> None:
    for error, args in (
        (openai.NotFoundError, {"model": "no-such-model", "prompt": "x"}),
        (openai.BadRequestError, {"model": model, "prompt": "x", "temperature": -1}),
        (openai.BadRequestError, {"model": model, "prompt": [10**9]}),
    ):
        refused: openai.APIStatusError | None = None
        try:
            client.completions.create(**args)
        except error as raised:
            refused = raised
        assert refused is not None, f"{args} was not refused"
        assert refused.body["message"]


async def check_async(url: str, model: str) -> None:
    args = {"model": model, "prompt": COUNTING, "max_tokens": 8, "temperature": 0}

    async def ask(client: openai.AsyncOpenAI) -> str:
        return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**args, stream=True)])

    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        answers = await asyncio.gather(*(ask(client) for _ in range(4)))
    assert all(answer.startswith(GOES_ON) for answer in answers), answers


def main(url: str, model: str, question: str, answer: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        check_models(client, model)
        check_chat(client, model, question, answer)
        check_logprobs(client, model, question)
        check_choices(client, model, question)
        check_completions(client, model)
        check_errors(client, model)
    asyncio.run(check_async(url, model))
    print(f"openai {openai.__version__}: right")


main(*sys.argv[1:])

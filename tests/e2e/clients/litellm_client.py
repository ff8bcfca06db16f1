"""What a user of `litellm` does: `python litellm_client.py URL MODEL QUESTION ANSWER`."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without it the import asks the network for prices

import litellm

COUNTING, GOES_ON = "1, 2, 3, 4, 5,", " 6, 7, 8"


def main(url: str, model: str, question: str, answer: str) -> None:
    place = {"api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 12, "timeout": 120}
    messages = [{"role": "user", "content": question}]
    whole = litellm.completion(model=f"openai/{model}", messages=messages, **place)
    content = whole.choices[0].message.content
    assert answer in content, whole
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    args = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(model=f"openai/{model}", messages=messages, **place, **args))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == content
    assert sum(text != "" for text in texts) > 1, "the answer came in one piece"
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].total_tokens == whole.usage.total_tokens

    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt=COUNTING, **place)
    assert text.choices[0].text.startswith(GOES_ON), text
    streamed = litellm.text_completion(model=f"text-completion-openai/{model}", prompt=COUNTING, stream=True, **place)
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == text.choices[0].text

    try:
        litellm.completion(model="openai/no-such-model", messages=messages, **place)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("an unknown model was not refused")
    print(f"litellm {version('litellm')}: right")


main(*sys.argv[1:])

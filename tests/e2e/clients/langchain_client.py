"""What a user of `langchain-openai` does: `python langchain_client.py URL MODEL QUESTION ANSWER`."""

from __future__ import annotations

import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

COUNTING, GOES_ON = "1, 2, 3, 4, 5,", " 6, 7, 8"


def main(url: str, model: str, question: str, answer: str) -> None:
    place = {"base_url": url, "api_key": "none", "model": model, "temperature": 0, "max_tokens": 12, "timeout": 120}
    chat = ChatOpenAI(**place, stream_usage=True)
    whole = chat.invoke([HumanMessage(question)])
    assert answer in whole.content, whole
    usage = whole.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] in ("stop", "length")

    chunks = list(chat.stream([HumanMessage(question)]))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum(chunk.content != "" for chunk in chunks) > 1, "the answer came in one piece"
    assert (
        sum(chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata) == usage["total_tokens"]
    )
    assert [reply.content for reply in chat.batch([question, question])] == [whole.content] * 2

    completions = OpenAI(**place)
    text = completions.invoke(COUNTING)
    assert text.startswith(GOES_ON), text
    assert "".join(completions.stream(COUNTING)) == text
    print(f"langchain-openai {version('langchain-openai')}: right")


main(*sys.argv[1:])

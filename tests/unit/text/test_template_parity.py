"""Published chat templates: benign conversations give the ids that transformers gives."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import TemplateError
from core.text.chat_template import ChatTemplate
from core.text.template_renderer import TemplateRenderer
from core.text.tokenizer import Tokenizer

TOKEN_SHAPE = re.compile(r"<\|[A-Za-z_0-9]+\|>|<｜[^<>｜]*｜>|\[/?[A-Z_]+\]|</?[a-z_]+>")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather of a city.\nNow é <b> & "quoted"',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "name"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CALL = [
    {
        "id": "abcdefgh1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}},
    }
]
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": "7 C"}
SYSTEM = {"role": "system", "content": "You are  helpful. "}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one": ([_user("Hello, world! 123 été 你好\n\n  x ")], {"add_generation_prompt": False}),
    "turns": ([SYSTEM, _user("hi"), _assistant(" Hey there!\n"), _user("  bye\t")], {}),
    "reasoning": ([_user("hi"), _assistant("Hey", reasoning_content="think a bit"), _user("more")], {}),
    "inline reasoning": ([_user("hi"), _assistant("<think>\nhm\n</think>\n\nHey"), _user("more")], {}),
    "no thinking": ([_user("hi")], {"enable_thinking": False}),
    "tools": ([_user("weather?")], {"tools": TOOLS}),
    "call": ([SYSTEM, _user("weather?"), _assistant("let me see", tool_calls=CALL), RESULT], {"tools": TOOLS}),
    "documents": ([_user("q?")], {"documents": [{"title": "T", "text": "body"}]}),
}


def _tokenizer(source: str, byte_level: Callable[..., Tokenizer]) -> Tokenizer:
    """A tokenizer that knows every control token and markup that the template writes."""
    texts = sorted(set(TOKEN_SHAPE.findall(source)) | {"<|begin|>", "<|end|>"})
    special = [text for text in texts if text.startswith(("<|", "<｜", "["))]
    markup = [text for text in texts if text not in special]
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return byte_level([b"th", b" a"], special, markup, special_tokens=names)


def test_ids_equal_those_of_transformers(
    shared_data: Path, byte_level: Callable[..., Tokenizer], renderer: TemplateRenderer
) -> None:
    transformers = pytest.importorskip("transformers")
    compared, differing = 0, []
    for file in sorted((shared_data / "chat_templates").glob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        tokenizer = _tokenizer(source, byte_level)
        ours = ChatTemplate(tokenizer, source, renderer=renderer)
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=_tokenizer(source, byte_level)._backend,
            chat_template=source,
            **tokenizer.info.special_tokens,
        )
        for name, (messages, options) in CONVERSATIONS.items():
            options = {"add_generation_prompt": True, **options}
            try:
                expected = theirs.apply_chat_template(
                    copy.deepcopy(messages), tokenize=True, return_dict=False, **options
                )
            except Exception:  # the template refuses this conversation; then so must ours, or print it
                continue
            compared += 1
            try:
                if ours.render_ids(messages, **options) != expected:
                    differing.append((file.name, name))
            except TemplateError as error:
                differing.append((file.name, f"{name}: {error}"))
    assert not differing
    assert compared > 250

"""Brings conversations into the one form that a template can print, without changing what they say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import TemplateError

__all__ = ["PART_SEPARATOR", "Message", "argument_objects", "argument_texts", "flatten_parts", "plain_messages"]

PART_SEPARATOR = "\n"
"""Put between the text parts of a message for a template that expects one string."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]
"""A message of a conversation: `role`, `content` and what else the template reads."""


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages: fields that are null are left out, missing content is "", reasoning has all its names.

    Raises:
        TemplateError: there is no message, or one is no object with a role.
    """
    if not messages or isinstance(messages, (str, bytes, Mapping)):
        raise TemplateError("messages must be a non-empty list of objects; send at least one message")
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _plain_message(message: Any, index: int) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError(f"messages[{index}] must be an object with a string 'role'; got {message!r:.100}")
    plain: Message = {key: _plain(value) for key, value in message.items() if value is not None}
    plain.setdefault("content", "")
    if not isinstance(plain["content"], (str, list)):
        kind = type(plain["content"]).__name__
        raise TemplateError(f"messages[{index}].content must be a string or a list of parts, got {kind}; send text")
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump())
    return value


def flatten_parts(parts: Sequence[Any], index: int) -> str:
    """The text of a list of parts, joined by `PART_SEPARATOR`.

    Raises:
        TemplateError: a part is not text.
    """
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise TemplateError(
                f"messages[{index}].content has a part of type {kind!r}, and the chat template takes text only; "
                "send text parts"
            )
    return PART_SEPARATOR.join(texts)


def _with_arguments(message: Message, change: Any) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    out = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": change(function["arguments"])}}
        out.append(call)
    return {**message, "tool_calls": out}


def argument_objects(message: Message) -> Message:
    """The message with arguments of tool calls as objects; text that is no JSON object stays text."""
    return _with_arguments(message, _argument_object)


def argument_texts(message: Message) -> Message:
    """The message with arguments of tool calls as JSON text."""
    return _with_arguments(message, lambda value: value if isinstance(value, str) else _dump(value))


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _argument_object(value: Any) -> Any:
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value

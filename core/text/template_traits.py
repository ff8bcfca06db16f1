"""What a chat template can take, found out by rendering small probes: text or parts, null or empty, object or text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.errors import TemplateError
from core.text.chat_messages import Message, argument_objects, argument_texts, flatten_parts
from core.text.template_renderer import TemplateStoppedError

__all__ = ["TemplateTraits"]

_WORD = "probeword"
_NAME, _KEY, _VALUE = "probe_name", "probe_key", "probe_value"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}

Render = Callable[[list[Message], list[Any] | None], str]


class TemplateTraits:
    """Answers about one template; each is found out when first needed, then kept.

    Args:
        render: Renders messages with tools; raises TemplateError.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._takes: dict[tuple[str, bool], bool] = {}
        self._call_form: tuple[bool, str | None] | None = None

    def adapt(self, messages: list[Message]) -> list[Message]:
        """The messages in the forms that the template prints whole.

        Raises:
            TemplateError: a message has parts that the template cannot take.
        """
        return [self._adapt(message, index) for index, message in enumerate(messages)]

    def _adapt(self, message: Message, index: int) -> Message:
        role, content = message["role"], message["content"]
        if isinstance(content, list) and not self._takes_content(role, parts=True):
            message = {**message, "content": flatten_parts(content, index)}
        elif isinstance(content, str) and content and self._wants_parts_only(role):
            message = {**message, "content": [{"type": "text", "text": content}]}
        if message.get("tool_calls"):
            objects, empty = self._tool_call_form()
            message = argument_objects(message) if objects else argument_texts(message)
            if message["content"] in ("", []):
                message["content"] = empty
        return message

    def _wants_parts_only(self, role: str) -> bool:
        return not self._takes_content(role, parts=False) and self._takes_content(role, parts=True)

    def _takes_content(self, role: str, *, parts: bool) -> bool:
        key = (role, parts)
        if key not in self._takes:
            content = [{"type": "text", "text": _WORD}] if parts else _WORD
            text = self._try(_conversation(role, content), None)
            self._takes[key] = _WORD in text and not any(mark in text for mark in ("'type'", '"type"', "[{"))
        return self._takes[key]

    def _tool_call_form(self) -> tuple[bool, str | None]:
        """Whether arguments must be objects, and what stands for missing content beside tool calls."""
        if self._call_form is None:
            forms: list[tuple[bool, str | None]] = [(True, ""), (False, ""), (True, None), (False, None)]
            self._call_form = next((form for form in forms if self._prints_call(*form)), (True, ""))
        return self._call_form

    def _prints_call(self, objects: bool, empty: str | None) -> bool:
        arguments: Any = {_KEY: _VALUE} if objects else f'{{"{_KEY}": "{_VALUE}"}}'
        text = self._try(_tool_conversation(arguments, empty, "7 C"), [_TOOL])
        printed = f"{text!s}".replace(" ", "")
        spoiled = f"'{_KEY}':'{_VALUE}'" in printed or f'\\"{_KEY}' in printed or (empty is None and "None" in text)
        return _KEY in text and _VALUE in text and _NAME in text and not spoiled

    def _try(self, messages: list[Message], tools: list[Any] | None) -> str:
        try:
            return self._render(messages, tools)
        except TemplateStoppedError:
            raise
        except TemplateError:
            return ""


def _conversation(role: str, content: Any) -> list[Message]:
    user = {"role": "user", "content": "hi"}
    probed = {"role": role, "content": content}
    if role == "user":
        return [probed]
    if role == "assistant":
        return [user, probed, user]
    if role in ("tool", "function", "ipython"):
        return _tool_conversation({_KEY: _VALUE}, "", content)
    return [probed, user]


def _tool_conversation(arguments: Any, empty: str | None, result: Any) -> list[Message]:
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": empty, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": _NAME, "content": result},
    ]

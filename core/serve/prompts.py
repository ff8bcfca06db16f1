"""From prompts and conversations to token ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from core.errors import InvalidRequestError, TemplateError
from core.serve.interface import ServedEngine
from core.serve.protocol import ChatPromptFields, Prompt
from core.text.chat_template import template_variables

__all__ = ["ChatEncoder", "ChatRenderer", "encode_prompts", "encode_text", "naming"]


class ChatEncoder(Protocol):
    """The part of `core.text.chat_template.ChatTemplate` that the server calls."""

    def render_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; blocks while the template runs."""
        ...

    def close(self) -> None:
        """Ends the processes in which templates run."""
        ...


INLINE_CHARS = 4000
"""Shorter texts are tokenized at once; longer ones in a thread, so that running streams go on."""


@contextlib.contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Makes errors raised inside name the request's own field: `fields` maps the engine's name to the caller's."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = fields.get(error.param or "", error.param)
        raise


async def encode_text(engine: ServedEngine, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of one text; see `encode_prompts`."""
    (token_ids,) = await encode_prompts(engine, [text], add_special_tokens)
    assert not isinstance(token_ids, str)
    return token_ids


async def encode_prompts(engine: ServedEngine, prompts: Sequence[Prompt], add_special_tokens: bool) -> list[Prompt]:
    """Each prompt as token ids; those that came as ids are passed on for the engine to check.

    Texts may spell control tokens. Texts that are long together are encoded in a thread.
    """
    tokenizer = engine.tokenizer

    def encode() -> list[Prompt]:
        return [
            list(tokenizer.encode(prompt, add_special_tokens=add_special_tokens)) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= INLINE_CHARS:
        return encode()
    return await asyncio.to_thread(encode)


class ChatRenderer:
    """Conversations to token ids, in a thread: templates run apart, and may take a while.

    Args:
        template: The model's; None where it has none.
        trust_special_tokens: Whether control tokens spelled in messages act as control tokens.
    """

    def __init__(self, template: ChatEncoder | None, *, trust_special_tokens: bool = False) -> None:
        self._template = template
        self._trust_special_tokens = trust_special_tokens

    async def render(self, chat: ChatPromptFields) -> list[int]:
        """Token ids of the conversation.

        Raises:
            TemplateError: there is no template, or it refuses the conversation.
        """
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions or start with --chat-template")
        return await asyncio.to_thread(
            self._template.render_ids,
            chat.messages,
            tools=None if getattr(chat, "tool_choice", None) == "none" else chat.tools,
            documents=chat.documents,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            trust_special_tokens=self._trust_special_tokens,
            **_variables(chat),
        )

    def close(self) -> None:
        """Ends the processes in which templates run."""
        if self._template is not None:
            self._template.close()


def _variables(chat: ChatPromptFields) -> dict[str, Any]:
    """Variables for the template that the request brings; it may not set what the server decides."""
    variables = template_variables(chat.chat_template_kwargs)
    if chat.reasoning_effort is not None:
        variables["reasoning_effort"] = chat.reasoning_effort
    return variables

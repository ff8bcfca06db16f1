"""From prompts and conversations to token ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from core.errors import InvalidRequestError, TemplateError
from core.serve.interface import ServedEngine
from core.serve.protocol import ChatPromptFields, Prompt

__all__ = ["encode_prompts", "naming", "render_chat"]

INLINE_CHARS = 4000
"""Shorter texts are tokenized at once; longer ones in a thread, so that running streams go on."""

Result = TypeVar("Result")


@contextlib.contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Makes errors raised inside name the request's own field: `fields` maps the engine's name to the caller's."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = fields.get(error.param or "", error.param)
        raise


async def _in_thread_if(large: bool, work: Callable[[], Result]) -> Result:
    return await asyncio.to_thread(work) if large else work()


async def encode_prompts(engine: ServedEngine, prompts: Sequence[Prompt], add_special_tokens: bool) -> list[Prompt]:
    """Each prompt as token ids; those that came as ids are passed on for the engine to check."""
    encoded: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encoded.append(await encode_text(engine, prompt, add_special_tokens))
        else:
            encoded.append(prompt)
    return encoded


async def encode_text(engine: ServedEngine, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`, which may spell control tokens."""
    tokenizer = engine.tokenizer
    ids = await _in_thread_if(
        len(text) > INLINE_CHARS, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
    )
    return list(ids)


async def render_chat(engine: ServedEngine, chat: ChatPromptFields, *, trust_special_tokens: bool) -> list[int]:
    """Token ids of a conversation, by the model's chat template.

    Args:
        trust_special_tokens: Whether control tokens spelled in messages act as control tokens.

    Raises:
        TemplateError: there is no template, or it refuses the conversation.
    """
    template = engine.tokenizer.chat_template
    if template is None:
        raise TemplateError("this model has no chat template; use /v1/completions or start with --chat-template")
    large = sum(len(str(message.get("content", ""))) for message in chat.messages) > INLINE_CHARS

    def render() -> list[int]:
        return list(
            template.render_ids(
                chat.messages,
                tools=_tools(chat),
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                trust_special_tokens=trust_special_tokens,
                **_template_kwargs(chat),
            )
        )

    return await _in_thread_if(large, render)


def _tools(chat: ChatPromptFields) -> list[dict[str, Any]] | None:
    if not chat.tools or getattr(chat, "tool_choice", None) == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in chat.tools]


def _template_kwargs(chat: ChatPromptFields) -> dict[str, Any]:
    kwargs = dict(chat.chat_template_kwargs or {})
    if chat.documents is not None:
        kwargs["documents"] = chat.documents
    if chat.reasoning_effort is not None:
        kwargs["reasoning_effort"] = chat.reasoning_effort
    return kwargs

"""From a conversation to the prompt's token ids, by the model's chat template, with no way in for control tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError, InvalidRequestError, TemplateError
from core.text.chat_messages import Message, plain_messages
from core.text.template_renderer import Rendered, TemplateRenderer
from core.text.template_traits import TemplateTraits
from core.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "PromptTokens", "read_template", "template_variables"]

_RESERVED = frozenset(
    {
        "self",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "trust_special_tokens",
        "template_name",
    }
)
_MARKUP_SHAPE = re.compile(r"[<\[{(].*[A-Za-z].*[>\]})]", re.DOTALL)


@dataclass(frozen=True)
class PromptTokens:
    """A rendered conversation.

    Args:
        text: The prompt as the template wrote it.
        token_ids: Its ids, ready for the engine; nothing is to be added.
    """

    text: str
    token_ids: list[int]


class ChatTemplate:
    """Renders conversations for one tokenizer. Safe to use from several threads.

    What comes from the request (contents, names, tool results, tool definitions, documents, variables) never becomes
    a control token: only characters that stand in the template itself can. Prompts without such spellings have the
    ids that the tokenizer gives for the rendered text.

    Args:
        tokenizer: Turns the prompt into ids, and names the special tokens.
        template: Jinja source, the path of a file that holds it, or several by name; None takes the tokenizer's own.
        renderer: Where templates run; None makes one that this object owns.

    Raises:
        ConfigError: `template` is the path of a file that does not exist.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | Path | Mapping[str, str] | None = None,
        *,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._sources = _sources(tokenizer.chat_template if template is None else template)
        self._renderer = renderer if renderer is not None else TemplateRenderer()
        self._traits: dict[str, TemplateTraits] = {}
        self._markup: dict[str, frozenset[int]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the templates at hand; empty where the model has none."""
        return tuple(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        trust_special_tokens: bool = False,
        template_name: str | None = None,
        **variables: Any,
    ) -> PromptTokens:
        """The prompt of a conversation.

        Args:
            messages: Objects with `role` and `content` (text, text parts, or null beside `tool_calls`). Text parts
                are joined by "\\n" where the template takes one string. Tool-call arguments may be JSON text.
            tools: Tool definitions.
            documents: Documents to answer from.
            add_generation_prompt: Open the assistant's turn; None does so unless the final message is continued.
            continue_final_message: Leave the final message open, for the model to go on with it.
            trust_special_tokens: Let control tokens spelled out in the conversation be control tokens.
            template_name: One of `names`; None takes "tool_use" where there are tools, else "default".
            variables: Further variables of the template (`enable_thinking`, ...); plain JSON values.

        Raises:
            TemplateError: there is no template, it failed, refused the conversation, or took too much time or memory.
            InvalidRequestError: the text is not well-formed Unicode.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError(
                "continue_final_message and add_generation_prompt cannot both be true; leave one of them out",
                param="continue_final_message",
            )
        source = self._source(template_name, bool(tools))
        plain = plain_messages(messages)
        values = {
            **variables,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
        }
        values["add_generation_prompt"] = (
            not continue_final_message if add_generation_prompt is None else add_generation_prompt
        )
        if continue_final_message:
            rendered = self._render_open(source, plain, values)
        else:
            rendered = self._render(source, self._traits_of(source).adapt(plain), values)
        return PromptTokens(rendered.text, self._encode(source, rendered, trusted=trust_special_tokens))

    def render_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `render(messages, **options)`."""
        return self.render(messages, **options).token_ids

    def close(self) -> None:
        """Ends the processes in which templates run; a later call starts them again."""
        self._renderer.close()

    def _source(self, name: str | None, has_tools: bool) -> str:
        if not self._sources:
            raise TemplateError("the model has no chat template; use the completions endpoint, or give --chat-template")
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            names = ", ".join(sorted(self._sources))
            raise TemplateError(f"there is no chat template called {name!r}; known: {names}", param="chat_template")
        return self._sources[name]

    def _render(self, source: str, messages: list[Message], values: Mapping[str, Any]) -> Rendered:
        return self._renderer.render(source, self.tokenizer.info.special_tokens, {**values, "messages": messages})

    def _render_open(self, source: str, messages: list[Message], values: Mapping[str, Any]) -> Rendered:
        """The prompt up to where the text of the final message ends.

        A private marker behind that text survives trimming, and says where it went even if the text is empty or
        occurs elsewhere.
        """
        marker = f"\ue8d3{secrets.randbits(64)}\ue8d4"
        marked = self._traits_of(source).adapt([*messages[:-1], _marked(messages[-1], marker)])
        rendered = self._render(source, marked, values)
        end = rendered.text.rfind(marker)
        if end < 0:
            raise TemplateError(
                "the chat template does not print the final message, so it cannot be continued; "
                "leave continue_final_message out",
                param="continue_final_message",
            )
        return Rendered(rendered.text[:end], rendered.mask[:end])

    def _traits_of(self, source: str) -> TemplateTraits:
        traits = self._traits.get(source)
        if traits is None:

            def probe(messages: list[Message], tools: list[Any] | None) -> str:
                return self._render(
                    source, messages, {"tools": tools, "documents": None, "add_generation_prompt": False}
                ).text

            traits = self._traits.setdefault(source, TemplateTraits(probe))
        return traits

    def _encode(self, source: str, rendered: Rendered, *, trusted: bool) -> list[int]:
        if trusted:
            return self.tokenizer.encode(rendered.text, add_special_tokens=False)
        return self.tokenizer.encode_masked(rendered.text, rendered.mask, self._markup_of(source))

    def _markup_of(self, source: str) -> frozenset[int]:
        """Added tokens that are no control tokens, and of which the template makes use ("<think>", "[INST]")."""
        markup = self._markup.get(source)
        if markup is None:
            # Opening and closing forms go together: a template may mention one of them only.
            mentioned = source.replace("/", "")
            markup = frozenset(
                token_id
                for token_id, token in self.tokenizer.added_tokens.items()
                if _MARKUP_SHAPE.fullmatch(token.content) and token.content.replace("/", "") in mentioned
            )
            self._markup[source] = markup
        return markup


def _marked(message: Message, marker: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        if not content and message.get("tool_calls"):
            raise TemplateError(
                "the final message holds tool calls and no text to continue; leave continue_final_message out",
                param="continue_final_message",
            )
        return {**message, "content": content + marker}
    for index in reversed(range(len(content))):
        part = content[index]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {
                **message,
                "content": [*content[:index], {**part, "text": part["text"] + marker}, *content[index + 1 :]],
            }
    raise TemplateError(
        "the final message has no text to continue; leave continue_final_message out", param="continue_final_message"
    )


def _sources(template: str | Path | Mapping[str, str] | None) -> dict[str, str]:
    if template is None:
        return {}
    if isinstance(template, Mapping):
        sources = dict(template)
        sources.setdefault("default", next(iter(sources.values()), ""))
        return sources
    return {"default": read_template(template)}


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The caller's own variables (`chat_template_kwargs`), fit to be passed to `ChatTemplate.render`.

    Raises:
        InvalidRequestError: one has the name of an argument of `render`.
    """
    variables = dict(given or {})
    for name in sorted(_RESERVED.intersection(variables)):
        message = f"chat_template_kwargs must not hold {name!r}; use the request field of that name where there is one"
        raise InvalidRequestError(message, param="chat_template_kwargs")
    return variables


def read_template(template: str | Path) -> str:
    """Jinja source: `template` itself where it looks like one, else the text of the file of that name.

    Raises:
        ConfigError: it is neither source nor a readable file.
    """
    if isinstance(template, str) and ("{" in template or "\n" in template or not template.strip()):
        return template
    path = Path(template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template {str(template)!r} is neither Jinja source nor a readable file ({error}); "
            "give a path or the source"
        ) from error

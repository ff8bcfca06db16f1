"""`core run`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from core.config import EngineConfig
from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from core.serve.chat_template import chat_renderer
from core.serve.interface import ServedEngine
from core.serve.prompts import ChatRenderer
from core.serve.protocol import ChatPromptFields

__all__ = ["Conversation", "answer", "chat", "converse"]


class Conversation:
    """Messages so far.

    Args:
        system: A system message that `/clear` keeps.
    """

    def __init__(self, system: str | None = None) -> None:
        self._system: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self._system)

    def ask(self, text: str) -> None:
        """Adds the user's message."""
        self.messages.append({"role": "user", "content": text})

    def say(self, text: str) -> None:
        """Adds the model's answer; an empty one takes the question back."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def clear(self) -> None:
        """Forgets all but the system message."""
        self.messages = list(self._system)


async def answer(
    engine: ServedEngine, renderer: ChatRenderer, conversation: Conversation, params: SamplingParams
) -> None:
    """Streams the next answer to standard output and adds it, also where it is stopped, to the conversation."""
    text = ""
    try:
        prompt = await renderer.render(ChatPromptFields(messages=conversation.messages))
        outputs = engine.generate(prompt, params)
        try:
            async for output in outputs:
                for choice in output.outputs:
                    text += choice.text
                    sys.stdout.write(choice.text)
                    sys.stdout.flush()
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]
    finally:
        sys.stdout.write("\n")
        conversation.say(text)


def chat(config: EngineConfig, conversation: Conversation, params: SamplingParams, prompt: str | None) -> None:
    """Loads the model and converses: one answer to `prompt` or to piped input, else until /bye.

    Raises:
        CoreError: the model cannot be served, or has no chat template.
    """
    from core.engine.async_engine import AsyncEngine

    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise InvalidRequestError("standard input is empty; pipe a question or give --prompt")
    with asyncio.Runner() as runner:
        engine = runner.run(AsyncEngine.start(config))
        try:
            renderer = chat_renderer(engine)
            if prompt is not None:
                conversation.ask(prompt)
                runner.run(answer(engine, renderer, conversation, params))
            else:
                converse(runner, engine, renderer, conversation, params)
        finally:
            runner.run(engine.shutdown())


def converse(
    runner: asyncio.Runner,
    engine: ServedEngine,
    renderer: ChatRenderer,
    conversation: Conversation,
    params: SamplingParams,
) -> None:
    """Reads lines until /bye or the end of input. Ctrl-C stops an answer; what was said of it stays."""
    sys.stderr.write("Ask something. /clear forgets the conversation, /bye leaves, Ctrl-C stops an answer.\n")
    while (line := _read_line()) is not None:
        if line == "/clear":
            conversation.clear()
        elif line.startswith("/"):
            sys.stderr.write(f"there is no command {line.split()[0]}; use /clear or /bye\n")
        elif line:
            conversation.ask(line)
            try:
                runner.run(answer(engine, renderer, conversation, params))
            except KeyboardInterrupt:
                continue
            except InvalidRequestError as error:
                sys.stderr.write(f"error: {error}\n")


def _read_line() -> str | None:
    """The next line without spaces around it; None at /bye and the end of input."""
    try:
        line = input(">>> ").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        sys.stderr.write("\n/bye leaves\n")
        return ""
    return None if line in ("/bye", "/exit", "/quit") else line

"""`core generate`: prompts in, text or JSON lines out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from core.cli.progress import progress_bar
from core.config import EngineConfig
from core.errors import ConfigError, CoreError
from core.outputs import RequestOutput
from core.sampling_params import SamplingParams
from core.serve.interface import ServedEngine
from core.serve.logprobs import TokenTexts, chat_logprobs

__all__ = ["generate_all", "read_prompts", "run_prompts"]


def read_prompts(prompts: Sequence[str], path: str | None) -> list[str]:
    """The given prompts, then those of the file, one a line; piped input where there are neither.

    Raises:
        ConfigError: the file cannot be read, or there is no prompt at all.
    """
    found = list(prompts)
    if path is None and not found and not sys.stdin.isatty():
        found = [text] if (text := sys.stdin.read()) else []
    elif path is not None:
        lines = (line.removesuffix("\r") for line in _text(path).removeprefix("\ufeff").split("\n"))
        found += [line for line in lines if line]
    if not found:
        raise ConfigError("there is no prompt; give --prompt, --prompt-file or pipe one")
    return found


def _text(path: str) -> str:
    if path == "-":
        return sys.stdin.read()
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {path!r} cannot be read: {error}; check the path") from None


def generate_all(config: EngineConfig, prompts: Sequence[str], params: SamplingParams, *, as_json: bool) -> None:
    """Loads the model, runs all prompts together and writes the results in their order.

    Raises:
        CoreError: the model cannot be served. A prompt that fails does not raise; its line says why.
    """
    from core.engine.async_engine import AsyncEngine

    async def work() -> None:
        engine = await AsyncEngine.start(config)
        try:
            await run_prompts(engine, prompts, params, config.scheduler.max_num_seqs, as_json=as_json)
        finally:
            await engine.shutdown()

    asyncio.run(work())


async def run_prompts(
    engine: ServedEngine, prompts: Sequence[str], params: SamplingParams, max_num_seqs: int, *, as_json: bool
) -> None:
    """Runs at most `max_num_seqs` prompts at once and writes each result as soon as those before it are written."""
    places = asyncio.Semaphore(max_num_seqs)
    with progress_bar("prompts", len(prompts)) as advance:

        async def one(prompt: str) -> RequestOutput | CoreError:
            async with places:
                try:
                    return await _last(engine, prompt, params)
                except CoreError as error:
                    return error
                finally:
                    advance()

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        for prompt, task in zip(prompts, tasks, strict=True):
            result = await task
            sys.stdout.write(_json_line(engine, prompt, result) if as_json else _plain(prompt, result, len(prompts)))
            sys.stdout.flush()


async def _last(engine: ServedEngine, prompt: str, params: SamplingParams) -> RequestOutput:
    outputs = engine.generate(prompt, params, delta=False)
    async with contextlib.aclosing(outputs):  # type: ignore[type-var]
        async for output in outputs:
            last = output
    return last


def _plain(prompt: str, result: RequestOutput | CoreError, count: int) -> str:
    if isinstance(result, CoreError):
        return f"error: {result}\n"
    texts = [choice.text for choice in result.outputs]
    heading = f"--- {prompt!r}\n" if count > 1 or len(texts) > 1 else ""
    return "".join(f"{heading}{text}\n" for text in texts)


def _json_line(engine: ServedEngine, prompt: str, result: RequestOutput | CoreError) -> str:
    if isinstance(result, CoreError):
        return msgspec.json.encode({"prompt": prompt, "error": str(result)}).decode() + "\n"
    texts = TokenTexts(engine.tokenizer)
    choices: list[dict[str, Any]] = []
    for choice in result.outputs:
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if choice.logprobs:
            top = len(choice.logprobs[0].token_ids) - 1
            shown["logprobs"] = chat_logprobs(choice.logprobs, texts, top)["content"]
        choices.append(shown)
    line = {"prompt": prompt, "prompt_token_ids": result.prompt_token_ids, "outputs": choices}
    return msgspec.json.encode(line).decode() + "\n"

"""The offline API: a model in this process, lists of prompts in, lists of RequestOutput out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

from rich.console import Console
from rich.progress import Progress

from core.config import EngineConfig
from core.engine.args import engine_config
from core.engine.build import build_engine, load_tokenizer
from core.engine.child import choose_device
from core.engine.heap import collections_paused
from core.engine.input_processor import InputProcessor, ProcessedRequest, Prompt, TokensPrompt
from core.engine.output_processor import OutputKind, OutputProcessor
from core.engine.protocol import EngineFacts
from core.errors import EngineDeadError, InvalidRequestError
from core.exec.runner_api import Runner
from core.outputs import EngineStats, RequestOutput
from core.sampling_params import SamplingParams
from core.text.chat_template import ChatTemplate, template_variables
from core.text.tokenizer import Tokenizer

__all__ = ["LLM"]

Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model to generate with, loaded on construction. Use it as a context manager, or call `shutdown`.

    Args:
        model: A folder, a GGUF file, or a name that `core pull` knows.
        device: Backend name, "auto", or "name:index".
        dtype: "auto" takes the checkpoint's type where the device has it.
        tokenizer: Folder or name of another tokenizer than the model's, or one that is already loaded.
        runner_factory: Makes the runner in place of the device's own; for tests and embedders.
        engine_args: Fields of EngineConfig, SchedulerConfig and CacheConfig by the names of the flags:
            `max_model_len`, `max_num_seqs`, `gpu_memory_utilization`, `enable_prefix_caching`, ...

    Raises:
        CoreError: an argument is wrong, or the model cannot be served on this device.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tokenizer: str | Tokenizer | None = None,
        runner_factory: Callable[[EngineConfig], Runner] | None = None,
        **engine_args: Any,
    ) -> None:
        if isinstance(tokenizer, str):
            engine_args["tokenizer"] = tokenizer
        self._config = engine_config(model, device=device, dtype=dtype, **engine_args)
        self._tokenizer = load_tokenizer(self._config) if tokenizer is None or isinstance(tokenizer, str) else tokenizer
        if runner_factory is None:
            self._config, env = choose_device(self._config)
            os.environ.update(env)  # SDKs read their switches when they are first imported
        with collections_paused():
            self._engine = build_engine(self._config, runner_factory=runner_factory)
        self._outputs = OutputProcessor(self._tokenizer)
        self._templates: dict[str | None, ChatTemplate] = {}
        self._request_ids = itertools.count()
        self._closed = False
        self._inputs = InputProcessor(
            self._tokenizer,
            vocab_size=self.facts.vocab_size,
            max_model_len=self.facts.max_model_len,
            max_logprobs=self._config.max_logprobs,
            eos_token_ids=self._tokenizer.eos_token_ids,
            seed=self._config.seed,
        )

    @property
    def facts(self) -> EngineFacts:
        """What is served: vocabulary, context window, device, KV pool."""
        return self._engine.facts

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in the order of the prompts, each with `n` choices.

        Args:
            prompts: Text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a list of these. A list of ints is one
                prompt.
            sampling_params: One for all or one a prompt; None is `SamplingParams()`.
            use_tqdm: Whether to show progress on standard error.
            priority: One a prompt, lower runs first; needs `scheduling_policy="priority"`.

        Raises:
            InvalidRequestError: a prompt or its parameters are wrong; nothing was run.
            EngineDeadError: the device failed for good.
        """
        batch = _as_batch(prompts)
        params = _one_each(sampling_params if sampling_params is not None else SamplingParams(), len(batch))
        if priority is not None and len(priority) != len(batch):
            raise InvalidRequestError(
                f"{len(priority)} priorities for {len(batch)} prompts; give one a prompt", param="priority"
            )
        if priority is not None and any(priority) and self._config.scheduler.scheduling_policy != "priority":
            raise InvalidRequestError(
                "priorities have no effect with this scheduling policy; make the LLM with scheduling_policy='priority'",
                param="priority",
            )
        requests = [
            self._inputs.process(
                prompt,
                params[i],
                request_id=str(next(self._request_ids)),
                priority=priority[i] if priority is not None else 0,
            )
            for i, prompt in enumerate(batch)
        ]
        return self._run(requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """The assistant's next turn of one conversation or of several, as `generate` would give it.

        Control tokens that are spelled out in messages stay text. `prompt` of an output is the rendered conversation.

        Args:
            messages: One conversation (a list of objects with `role` and `content`), or a list of conversations.
            sampling_params: As for `generate`.
            use_tqdm: As for `generate`.
            tools: Tool definitions that the template shows to the model.
            chat_template: Jinja source or a file of it, in place of the model's own.
            chat_template_kwargs: Further variables of the template.
            add_generation_prompt: Open the assistant's turn; None does so unless the final message is continued.
            continue_final_message: Leave the final message open, for the model to go on with it.

        Raises:
            TemplateError: there is no template, or it refuses a conversation.
            InvalidRequestError: as for `generate`, and where a variable has the name of an argument here.
        """
        conversations = _as_conversations(messages)
        template = self._template(chat_template)
        variables = template_variables(chat_template_kwargs)
        prompts = [
            template.render(
                conversation,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            for conversation in conversations
        ]
        batch: list[Prompt] = [TokensPrompt(prompt_token_ids=prompt.token_ids) for prompt in prompts]
        outputs = self.generate(batch, sampling_params, use_tqdm=use_tqdm)
        for output, prompt in zip(outputs, prompts, strict=True):
            output.prompt = prompt.text
        return outputs

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, as `generate` would see it."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def get_metrics(self) -> EngineStats:
        """Gauges and counters of the engine."""
        return self._engine.stats()

    def reset_prefix_cache(self) -> None:
        """Makes sure that no later prompt reuses what has been computed up to now."""
        self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Frees the device. A second call has no effect."""
        self._closed = True
        self._engine.close()
        for template in self._templates.values():
            template.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _template(self, source: str | None) -> ChatTemplate:
        if source not in self._templates:
            self._templates[source] = ChatTemplate(self._tokenizer, source)
        return self._templates[source]

    def _run(self, requests: Sequence[ProcessedRequest], *, use_tqdm: bool) -> list[RequestOutput]:
        """Runs all of them to their ends; nothing of them is left in the engine, whatever happens."""
        if self._closed:
            raise EngineDeadError("this LLM was shut down; make a new one")
        done: dict[str, RequestOutput] = {}
        try:
            for request in requests:
                self._outputs.add(request, OutputKind.FINAL_ONLY)
                self._engine.add_requests(request.choices)
            with Progress(console=Console(stderr=True), transient=True, disable=not use_tqdm) as progress:
                task = progress.add_task("requests", total=len(requests))
                for key, output in self._finished():
                    done[key] = output
                    progress.advance(task)
        finally:
            self._engine.abort([engine_id for request in requests for engine_id in self._outputs.discard(request.key)])
        return [done[request.key] for request in requests]

    def _finished(self) -> Iterable[tuple[str, RequestOutput]]:
        """(key, output) of each request as it ends, until the engine has no more work."""
        while self._engine.has_work():
            news, finished_early = self._outputs.process(self._engine.step())
            self._engine.abort(finished_early)
            yield from news


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts must be text, token ids, or a list of these, got {type(prompts).__name__}", param="prompt"
        )
    batch: list[Any] = list(prompts)
    return [batch] if batch and isinstance(batch[0], int) else batch


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if messages and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return list(cast(Sequence[Conversation], messages))


def _one_each(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(params, SamplingParams) for params in given):
        raise InvalidRequestError("sampling_params must be a SamplingParams or a list of them", param="sampling_params")
    if len(given) != count:
        raise InvalidRequestError(
            f"{len(given)} sampling_params for {count} prompts; give one for all or one a prompt",
            param="sampling_params",
        )
    return list(given)

"""lm-eval over a server and over the same checkpoint in transformers, as a process of its own without a network.

`python -m core_conformance.served.lm_eval_run REQUEST.json RESULT.json`, in the folder of the tasks: their files name
their documents relative to it. A process of its own, because lm-eval and its datasets read the environment when they
are imported, and leave threads and caches behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval import simple_evaluate  # type: ignore[import-not-found, unused-ignore]
from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found, unused-ignore]
from lm_eval.models.openai_completions import (  # type: ignore[import-not-found, unused-ignore]
    LocalChatCompletion,
    LocalCompletionsAPI,
)
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

__all__ = ["Reference", "main"]

_SMALL = 20_000_000
"""Parameters below which a step is too short to be shared."""


class Reference(TemplateLM):  # type: ignore[misc]
    """The checkpoint in transformers: float32 on the host, one request at a time, greedy.

    Args:
        folder: The checkpoint.
        chat_template: In place of the tokenizer's own, where given.
    """

    def __init__(self, folder: str, chat_template: str | None) -> None:
        super().__init__()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._known = len(self.tokenizer)
        if self._model.num_parameters() < _SMALL:
            torch.set_num_threads(1)  # threads that wait for each other take ten times the work itself
        self.margins: list[float] = []
        """Of each generated answer: the smallest gap between the two best tokens, in nats."""

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def tokenizer_name(self) -> str:
        return "reference"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return [*self.tokenizer(string, add_special_tokens=False).input_ids]

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        results = []
        for _, context, continuation in requests:
            ids = torch.tensor([[*context, *continuation]])
            logits = self._model(ids[:, :-1]).logits[0, -len(continuation) :, : self._known]
            wanted = ids[0, -len(continuation) :]
            chosen = logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
            results.append((float(chosen), bool((logits.argmax(-1) == wanted).all())))
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("no task of the suite asks for it")

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    @torch.inference_mode()
    def _generate(self, context: str, options: dict[str, Any]) -> str:
        """Greedy text up to the first stop string; the margin counts the tokens up to there alone."""
        ids = torch.tensor([self.tok_encode(context)])
        out = self._model.generate(
            ids,
            max_new_tokens=options["max_gen_toks"],
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=self.eot_token_id,
        )
        made = [token for token in out.sequences[0, ids.shape[1] :].tolist() if token != self.eot_token_id]
        best = torch.cat(out.logits)[:, : self._known].topk(2).values
        text, length = str(self.tokenizer.decode(made, skip_special_tokens=True)), len(best)
        stops = [at for stop in options["until"] if (at := text.find(stop)) >= 0]
        if stops:
            text = text[: min(stops)]
            length = min(len(self.tok_encode(text)) + 1, length)
        self.margins.append(float((best[:length, 0] - best[:length, 1]).min()))
        return text


def _served(request: dict[str, Any], *, chat: bool) -> Any:
    """lm-eval's own client of a local server."""
    route = "chat/completions" if chat else "completions"
    common = {"model": request["name"], "base_url": f"{request['url']}/v1/{route}", "max_retries": 1}
    common |= {"max_length": request["max_length"], "num_concurrent": 4}
    if chat:
        return LocalChatCompletion(**common)
    return LocalCompletionsAPI(**common, tokenizer_backend="huggingface", tokenizer=request["folder"])


def _evaluate(model: Any, task: str, manager: TaskManager, *, chat: bool) -> list[dict[str, Any]]:
    """`{"score", "text", "margin"}` of each document in its order."""
    found = simple_evaluate(
        model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, apply_chat_template=chat, verbosity="ERROR"
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [_shown(sample) for sample in samples]


def _shown(sample: dict[str, Any]) -> dict[str, Any]:
    """Score, generated text (None of a choice), and how clearly a choice was made."""
    if "acc" in sample:
        values = sorted((float(answer[0][0]) for answer in sample["resps"]), reverse=True)
        return {"score": float(sample["acc"]), "text": None, "margin": values[0] - values[1]}
    return {"score": float(sample["exact_match"]), "text": sample["resps"][0][0], "margin": None}


def main(request_path: str, result_path: str) -> None:
    """Evaluates every task of the request over the server and over the reference.

    The request has `url`, `name`, `folder`, `chat_template`, `max_length`, and `tasks`: `{"task", "chat"}`. The result
    has for each task `served` and `reference`, lists of documents as `_shown` makes them.
    """
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    manager = TaskManager(include_path=str(Path.cwd()), include_defaults=False)
    reference = Reference(request["folder"], request["chat_template"])
    result = {}
    for task in request["tasks"]:
        chat, name = task["chat"], task["task"]
        served = _evaluate(_served(request, chat=chat), name, manager, chat=chat)
        reference.margins.clear()
        own = _evaluate(reference, name, manager, chat=chat)
        for document, margin in zip(own, reference.margins, strict=False):
            document["margin"] = margin
        result["chat" if chat else name] = {"served": served, "reference": own}
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Documents of the copy model's accuracy tasks. `python -m core_conformance.served.task_data` writes them anew.

In one document of ten the label is wrong on purpose: the reference then reaches 0.9, and a server that scores better
or worse than the model does is seen.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from core_conformance.engines.models import COPY_DISTANCE
from core_conformance.served.copying import STOP, STOP_CAUSE, copy_answer, copy_prompt, letters

__all__ = ["TASKS", "choice_documents", "main", "text_documents"]

TASKS = Path(__file__).parent / "tasks"
"""Tasks as lm-eval reads them: a YAML file each, beside the JSON lines of its documents."""
_COUNT = 24
_CHOICES = 4
_CHOICE_TOKENS = 6


def choice_documents() -> list[dict[str, Any]]:
    """`{"prompt", "choices", "label"}`: which of four continuations is the most likely one."""
    documents = []
    for number in range(_COUNT):
        dice = random.Random(number)
        prompt = copy_prompt(dice.randrange(45, 100), seed=1000 + number)
        right = copy_answer(prompt, _CHOICE_TOKENS)
        choices = [_changed(right, dice) for _ in range(_CHOICES - 1)]
        label = dice.randrange(_CHOICES)
        choices.insert(label, right)
        documents.append({"prompt": prompt, "choices": choices, "label": _spoilt(number, label)})
    return documents


def _changed(text: str, dice: random.Random) -> str:
    """The text with one letter replaced."""
    at = dice.randrange(len(text))
    other = dice.choice([letter for letter in letters() if letter != text[at]])
    return text[:at] + other + text[at + 1 :]


def _spoilt(number: int, label: int) -> int:
    return (label + 1) % _CHOICES if number % 10 == 9 else label


def text_documents() -> list[dict[str, Any]]:
    """`{"prompt", "answer"}`: what follows up to the stop string, in lengths from 1 to the most that is generated."""
    documents = []
    for number in range(_COUNT):
        dice = random.Random(500 + number)
        prompt = copy_prompt(dice.randrange(45, 100), seed=2000 + number)
        stop_at = dice.randrange(1, COPY_DISTANCE)
        if number % 8 != 7:  # every eighth goes on to the length limit
            cause = len(prompt) - COPY_DISTANCE - 1 + stop_at
            prompt = prompt[:cause] + STOP_CAUSE + prompt[cause + 1 :]
        answer = copy_answer(prompt, COPY_DISTANCE).partition(STOP)[0]
        documents.append({"prompt": prompt, "answer": answer[:-1] if number % 10 == 9 else answer})
    return documents


def main() -> None:
    """Writes the files."""
    for name, documents in (("copy_choice", choice_documents()), ("copy_text", text_documents())):
        lines = "".join(f"{json.dumps(document)}\n" for document in documents)
        (TASKS / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()

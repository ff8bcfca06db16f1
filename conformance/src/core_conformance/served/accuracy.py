"""What lm-eval says of a served model beside the same checkpoint in transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_conformance.records import ErrorOutcome
from core_conformance.served.reaper import watched
from core_conformance.served.server import MODEL_NAME, Server
from core_conformance.served.task_data import TASKS
from core_conformance.subject import Mismatch
from core_conformance.tolerance import ACCURACY_MARGIN

__all__ = ["EXTRA", "Scores", "evaluate", "require_lm_eval"]

EXTRA = "core-conformance[accuracy]"
"""What brings lm-eval."""
_TIMEOUT_S = 1800.0
_ERROR_LINES = 6


@dataclass(frozen=True)
class Scores:
    """Scores of one task.

    Args:
        served: Right documents over the server, among those that count.
        reference: Right documents in transformers, among those that count.
        documents: Documents that count.
        ambiguous: Documents that rounding decides; they count for nobody.
        served_tokens: Generated tokens over the server, all documents; 0 where nothing is generated.
        reference_tokens: In transformers.
    """

    served: float
    reference: float
    documents: int
    ambiguous: int
    served_tokens: int
    reference_tokens: int

    @property
    def accuracy_share(self) -> float:
        """Served accuracy as a share of the reference's."""
        return self.served / self.reference if self.reference else float(self.served == 0)

    @property
    def length_share(self) -> float:
        """Generated tokens as a share of the reference's."""
        return self.served_tokens / self.reference_tokens if self.reference_tokens else float("nan")


def require_lm_eval() -> None:
    """Raises ErrorOutcome where lm-eval, or what its client needs, is not installed."""
    missing = [name for name in ("lm_eval", "aiohttp", "tenacity") if importlib.util.find_spec(name) is None]
    if missing:
        raise ErrorOutcome(f"{', '.join(missing)} cannot be imported; install it: pip install '{EXTRA}'")


def evaluate(
    server: Server, folder: Path, tasks: list[dict[str, Any]], *, chat_template: str | None
) -> dict[str, Scores]:
    """Runs lm-eval's local client against the server, and its reference, in a process without a network.

    Args:
        server: Serves `folder`.
        folder: The checkpoint, for the tokenizer and the reference.
        tasks: `{"task": NAME, "chat": BOOL}`; the scores of chat go under "chat".
        chat_template: The server's, where it is not the checkpoint's.

    Raises:
        Mismatch: it came to no result, most likely because the server answered with an error; holds its last lines.
    """
    limit = server.get("/v1/models").json()["data"][0]["max_model_len"]
    request = {"url": server.url, "name": MODEL_NAME, "folder": str(folder), "max_length": limit, "tasks": tasks}
    with tempfile.TemporaryDirectory(prefix="core-conformance-accuracy-") as place:
        paths = Path(place) / "request.json", Path(place) / "result.json"
        paths[0].write_text(json.dumps({**request, "chat_template": chat_template}), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "core_conformance.served.lm_eval_run", *map(str, paths)]
        code, said = _run(command, place)
        if code or not paths[1].exists():
            last = " | ".join(said.strip().splitlines()[-_ERROR_LINES:])
            raise Mismatch(f"lm-eval came to no result (exit code {code}): {last[-1500:]}")
        found = json.loads(paths[1].read_text(encoding="utf-8"))
    count = _token_counter(folder)
    return {name: _scores(documents, count) for name, documents in found.items()}


def _run(command: list[str], place: str) -> tuple[int, str]:
    """Exit code and standard error of a process that ends with this one, and with whatever ends the wait for it."""
    environment = {**os.environ, **_offline(place)}
    with subprocess.Popen(
        command,
        cwd=TASKS,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            with watched(process.pid):
                _, said = process.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    return process.returncode, said


def _offline(place: str) -> dict[str, str]:
    """No road to a hub, and caches that go away with the run."""
    never = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return {**never, "HF_HOME": place, "HF_DATASETS_CACHE": place, "TOKENIZERS_PARALLELISM": "false", "NO_PROXY": "*"}


def _token_counter(folder: Path) -> Callable[[str], int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)


def _scores(documents: dict[str, list[dict[str, Any]]], count: Callable[[str], int]) -> Scores:
    served, reference = documents["served"], documents["reference"]
    pairs = list(zip(served, reference, strict=True))
    clear = [(mine, own) for mine, own in pairs if own["margin"] is None or own["margin"] >= ACCURACY_MARGIN]
    return Scores(
        served=sum(mine["score"] for mine, _ in clear),
        reference=sum(own["score"] for _, own in clear),
        documents=len(clear),
        ambiguous=len(pairs) - len(clear),
        served_tokens=sum(count(mine["text"]) for mine, _ in pairs if mine["text"] is not None),
        reference_tokens=sum(count(own["text"]) for _, own in pairs if own["text"] is not None),
    )

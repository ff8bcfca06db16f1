"""L4: a served model answers as well as its checkpoint does in transformers, and neither at more nor at less length."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from core_conformance.checks import check
from core_conformance.records import ErrorOutcome, Findings, UnsupportedOutcome
from core_conformance.served.accuracy import Scores, evaluate, require_lm_eval
from core_conformance.served.setups import CHAT_TEMPLATE, ROOMY, Servers
from core_conformance.subject import Mismatch
from core_conformance.tolerance import ACCURACY_SHARE, LENGTH_SHARE

_LEAST_DOCUMENTS = 12


@functools.cache
def _evaluated(servers: Servers) -> dict[str, Scores] | ErrorOutcome | Mismatch:
    """All tasks in one run of lm-eval; what keeps it from a result is said to each check that asks."""
    try:
        require_lm_eval()
        return _evaluate(servers)
    except (ErrorOutcome, Mismatch) as error:
        return error


def _evaluate(servers: Servers) -> dict[str, Scores]:
    real = servers.real_model()
    tasks: list[dict[str, Any]]
    if real is None:
        tasks = [
            {"task": "copy_choice", "chat": False},
            *({"task": "copy_text", "chat": chat} for chat in (False, True)),
        ]
        return evaluate(servers.get(ROOMY), servers.folder(ROOMY), tasks, chat_template=CHAT_TEMPLATE)
    tasks = [{"task": "facts_choice", "chat": False}, {"task": "facts_text", "chat": False}]
    folder = servers.folder(real)
    if _has_chat_template(folder):
        tasks.append({"task": "facts_chat", "chat": True})
    return evaluate(servers.get(real), folder, tasks, chat_template=None)


def _has_chat_template(folder: Path) -> bool:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).chat_template is not None


def _scores(servers: Servers, findings: Findings, part: str) -> Scores:
    """Scores of one part ("choice", "text", "chat") with their facts noted."""
    found = _evaluated(servers)
    if isinstance(found, Exception):
        raise type(found)(*found.args)
    model = servers.options.model
    findings.notes["model"] = "copy" if model is None else model.name
    name = next((name for name in found if name.endswith(part)), None)
    if name is None:
        raise UnsupportedOutcome(f"{model} has no chat template: it serves no conversations")
    scores = found[name]
    findings.notes |= {"documents": scores.documents, "ambiguous": scores.ambiguous}
    return scores


@check("L4/accuracy", ["choice", "text", "chat"])
def test_accuracy(servers: Servers, findings: Findings, variant: str) -> None:
    """Right answers to multiple choice, in free text, and in a chat: at least 99 % of the reference's."""
    scores = _scores(servers, findings, variant)
    findings.notes |= {"served": scores.served, "reference": scores.reference}
    findings.err, findings.bound = max(1 - scores.accuracy_share, 0.0), 1 - ACCURACY_SHARE
    findings.ratio = findings.err / findings.bound
    if scores.documents < _LEAST_DOCUMENTS or not scores.reference:
        raise Mismatch(
            f"accuracy ({variant}): the reference is right on {scores.reference:.0f} of {scores.documents} documents "
            f"that rounding does not decide; at least {_LEAST_DOCUMENTS} are needed to say anything"
        )
    if scores.accuracy_share < ACCURACY_SHARE:
        raise Mismatch(
            f"accuracy ({variant}): {scores.served:.0f} of {scores.documents} documents are right, in transformers "
            f"{scores.reference:.0f}: {scores.accuracy_share:.1%} of it, at least {ACCURACY_SHARE:.0%} is asked"
        )


@check("L4/length", ["text", "chat"])
def test_generated_length(servers: Servers, findings: Findings, variant: str) -> None:
    """Generated tokens in free text and in a chat: 90 to 110 % of the reference's."""
    scores, (least, most) = _scores(servers, findings, variant), LENGTH_SHARE
    findings.notes |= {"served_tokens": scores.served_tokens, "reference_tokens": scores.reference_tokens}
    findings.err, findings.bound = abs(scores.length_share - 1), most - 1
    findings.ratio = findings.err / findings.bound
    if not least <= scores.length_share <= most:
        raise Mismatch(
            f"length ({variant}): {scores.served_tokens} tokens were generated, in transformers "
            f"{scores.reference_tokens}: {scores.length_share:.1%}, {least:.0%} to {most:.0%} are asked"
        )

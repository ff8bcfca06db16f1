"""The JSON of a shields.io endpoint badge."""

from __future__ import annotations

import json

from core_conformance.report.matrix import FAILED, UNTESTED, Matrix

__all__ = ["to_badge"]

_COLORS = {"VALIDATED": "brightgreen", "SIMULATED": "blue", "COMPILED": "yellow", UNTESTED: "lightgrey", FAILED: "red"}


def to_badge(matrix: Matrix) -> str:
    """What each backend reached as a whole; the colour is that of the weakest."""
    words: dict[str, tuple[str, str]] = {}
    for report in matrix.reports:
        word = str(report.facts.mode) if report.level_reached else FAILED
        words.setdefault(report.facts.backend, (report.level_reached, word))
    order = [FAILED, UNTESTED, "COMPILED", "SIMULATED", "VALIDATED"]
    weakest = min((word for _, word in words.values()), key=order.index, default=UNTESTED)
    alone = len(words) == 1
    told = [" ".join(filter(None, ("" if alone else name, *pair))) for name, pair in sorted(words.items())]
    badge = {
        "schemaVersion": 1,
        "label": f"conformance {next(iter(words))}" if alone else "conformance",
        "message": ", ".join(told) or UNTESTED,
        "color": _COLORS[weakest],
        "isError": weakest == FAILED,
    }
    return json.dumps(badge, indent=1) + "\n"

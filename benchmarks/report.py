"""What a comparison found, as JSON, as a table, and as a plot of each rate's share of what the machine can do."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["markdown_table", "share_plot"]

Lines = Mapping[str, Mapping[str, Any]]
"""By "model scheme test": `rates` (engine to its figure in each counted round) and `limit`, which may be None."""

_COLORS = {"ours": "#1b7837", "llama.cpp": "#9970ab", "vLLM-CPU": "#4393c3", "OpenVINO": "#d6604d"}


def markdown_table(lines: Lines) -> str:
    """Medians; ratios are taken round by round, so that a machine that drifts drifts for both."""
    names = _engines(lines)[1:]
    head = ["line", "limit", "ours", "share of it", *(word for name in names for word in (name, f"ours / {name}"))]
    rows = [head, ["---"] * len(head)]
    for title, line in lines.items():
        rates, limit = line["rates"], line["limit"]
        ours = rates.get("ours", ())
        share = f"{statistics.median(ours) / limit:.0%}" if limit and ours else ""
        row = [title, f"{limit:.0f}" if limit else "", _figure(ours), share]
        for name in names:
            row += [_figure(rates.get(name, ())), _ratio(ours, rates.get(name, ()))]
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def share_plot(lines: Lines, title: str) -> str:
    """An SVG: for each line with a limit one bar an engine, 100 % being that limit."""
    shown = {name: line for name, line in lines.items() if line["limit"] and any(line["rates"].values())}
    names = _engines(shown)
    bar, gap, left, width = 9, 10, 230, 520
    height = 60 + sum(bar * len(names) + gap for _ in shown)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18" font-size="13">{html.escape(title)}</text>',
    ]
    for index, name in enumerate(names):
        x = left + 110 * index
        out.append(f'<rect x="{x}" y="28" width="10" height="10" fill="{_COLORS.get(name, "#888")}"/>')
        out.append(f'<text x="{x + 14}" y="37">{html.escape(name)}</text>')
    y = 50
    for title_, line in shown.items():
        out.append(
            f'<text x="{left - 6}" y="{y + bar * len(names) / 2 + 4}" text-anchor="end">{html.escape(title_)}</text>'
        )
        for name in names:
            rates = line["rates"].get(name, ())
            if rates:
                share = statistics.median(rates) / line["limit"]
                out.append(
                    f'<rect x="{left}" y="{y}" width="{width * min(share, 1.05):.1f}" height="{bar - 1}" '
                    f'fill="{_COLORS.get(name, "#888")}"/>'
                    f'<text x="{left + width * min(share, 1.05) + 4:.1f}" y="{y + bar - 1}" font-size="9">'
                    f"{share:.0%}</text>"
                )
            y += bar
        y += gap
    out.append(f'<line x1="{left + width}" y1="44" x2="{left + width}" y2="{y}" stroke="#333" stroke-dasharray="3"/>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _engines(lines: Lines) -> Sequence[str]:
    """Names in the order in which they appear, ours first."""
    found = dict.fromkeys(name for line in lines.values() for name in line["rates"])
    return ["ours", *(name for name in found if name != "ours")]


def _figure(rates: Sequence[float]) -> str:
    if not rates:
        return "-"
    value = statistics.median(rates)
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    pairs = [a / b for a, b in zip(ours, theirs, strict=False) if b]
    return f"{statistics.median(pairs):.2f}" if pairs else ""

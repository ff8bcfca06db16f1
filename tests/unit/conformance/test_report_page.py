"""The HTML matrix in a real browser: words, colours, what a click and a key show; it asks nobody for anything."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core_conformance.records import Mode, Outcome
from core_conformance.report.html import to_html
from core_conformance.report.matrix import build_matrix
from core_conformance.report.trend import compare_reports

sys.path.append(str(Path(__file__).parent))

from chromium import REMEDY, Chromium, find_chromium

PROGRAM = find_chromium()
needs_browser = pytest.mark.skipif(PROGRAM is None, reason=REMEDY)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert PROGRAM is not None
    browser = Chromium(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(make_report: Any, tmp_path: Path) -> Path:
    """A matrix with every word: two devices, a simulated and a compiled one, failures, a trend."""
    broken = {"L3/abort/llama": {"outcome": Outcome.FAIL, "reason": "block 7 is still held <script>alert(1)</script>"}}
    old = make_report(date="2029-12-01T00:00:00+00:00")
    device = make_report(change={**broken, "L1/rms_norm/small-bf16": {"ratio": 0.93, "err": 0.465}})
    refused = {r.id: {"outcome": Outcome.UNSUPPORTED} for r in old.records if r.model == "gemma3"}
    reports = [
        device,
        make_report(mode=Mode.SIMULATED, device="acme-sim", change=refused),
        make_report("L0", "L1", mode=Mode.COMPILED, device="acme-2"),
        make_report("L0", device="acme-3", change={"L0/memory": {"outcome": Outcome.FAIL, "reason": "lost 3 bytes"}}),
    ]
    path = tmp_path / "matrix.html"
    path.write_text(to_html(build_matrix(reports), [compare_reports(old, device)]), encoding="utf-8")
    return path


def color(browser: Chromium, selector: str) -> str:
    return str(browser.evaluate(f"getComputedStyle(document.querySelector('{selector}')).backgroundColor"))


def pixels(path: Path) -> list[bytes]:
    """Rows of a PNG as they are stored: each filtered by its neighbours, so that rows differ where the picture does."""
    data, place, stream = path.read_bytes(), 8, b""
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        stream += data[place + 8 : place + 8 + size] if kind == b"IDAT" else b""
        place += size + 12
    width, height = struct.unpack(">II", data[16:24])
    raw = zlib.decompress(stream)
    row = len(raw) // height
    assert row > width
    return [raw[i * row : (i + 1) * row] for i in range(height)]


def test_the_page_needs_nothing_from_elsewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for word in ("http://", "https://", "<script", "<link", "<img", "@import", "url("):
        assert word not in text, word
    assert "&lt;script&gt;" in text, "what a check says is shown, not run"


@needs_browser
def test_words_levels_and_colours_are_seen(browser: Chromium, page: Path) -> None:
    browser.events.clear()
    browser.open(page.as_uri())
    cells = browser.evaluate("[...document.querySelectorAll('.matrix .cell')].map(c => c.innerText)")
    words = {word for cell in cells for word in cell.split() if word.isupper() and len(word) > 3}
    assert words == {"VALIDATED", "SIMULATED", "COMPILED", "UNTESTED", "UNSUPPORTED", "FAILED"}
    assert any("L3" in cell and "VALIDATED" in cell and "0.93" in cell for cell in cells)
    kinds = ("VALIDATED", "SIMULATED", "COMPILED", "UNTESTED", "UNSUPPORTED", "FAILED")
    light = {kind: color(browser, f".legend .{kind}") for kind in kinds}
    assert all(color(browser, f".matrix button.{kind}") == light[kind] for kind in kinds if kind != "UNTESTED")
    assert len(set(light.values())) == len(kinds)
    headers = browser.evaluate("[...document.querySelectorAll('.matrix th')].map(h => h.innerText.split('\\n')[0])")
    assert headers == ["model", "acme", "acme", "acme", "acme", "operations", "copy", "gemma3", "llama"]
    browser.open(page.as_uri() + "#dark", scheme="dark")
    dark = {kind: color(browser, f".legend .{kind}") for kind in kinds}
    assert not set(light.values()) & set(dark.values()) and len(set(dark.values())) == len(kinds)
    asked = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert asked and all(url.startswith("file:") for url in asked)
    assert not [e for e in browser.events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_its_ground(browser: Chromium, page: Path, scheme: str) -> None:
    """Contrast of at least 4.5 (WCAG 2.2, 1.4.3) in each cell, chip, and line of quiet text."""
    browser.open(f"{page.as_uri()}#{scheme}-contrast", scheme=scheme)
    worst = browser.evaluate(
        """(() => {
          const linear = x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
          const light = c => { const v = c.map(x => linear(x / 255));
                               return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
          const read = text => text.match(/[0-9.]+/g).map(Number);
          const ground = e => { for (; e; e = e.parentElement) { const c = read(getComputedStyle(e).backgroundColor);
                                if (c.length == 3 || c[3] > 0) return c; } return [255, 255, 255]; };
          const ratio = e => { const a = light(read(getComputedStyle(e).color)), b = light(ground(e));
                               return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); };
          document.querySelectorAll('[popover]').forEach(p => p.showPopover());
          return [...document.querySelectorAll('.cell, .word, .kind, .quiet, .bad, dt, td, th, p, h1, h2')]
            .map(e => [ratio(e), e.className || e.tagName]).sort((a, b) => a[0] - b[0])[0];
        })()"""
    )
    assert worst[0] >= 4.5, worst


@needs_browser
def test_a_click_shows_what_stands_behind_a_cell(browser: Chromium, page: Path, tmp_path: Path) -> None:
    browser.open(page.as_uri() + "#click")
    assert browser.evaluate("document.querySelectorAll('[popover]:popover-open').length") == 0
    assert "contract 1." in browser.evaluate("document.querySelector('.matrix button').title")
    browser.click("button[popovertarget='cell-4-1']")
    shown = browser.evaluate("document.querySelector('[popover]:popover-open').innerText")
    for part in (
        "llama on acme",
        "VALIDATED",
        "Acme One (acme-1), sdk 3",
        "0.93 in L1/rms_norm/small-bf16",
        "2030-01-02",
    ):
        assert part in shown, part
    assert "core-inference" in shown and "self-reported" in shown and "block 7 is still held <script>" in shown
    rows = browser.evaluate(
        "[...document.querySelectorAll(':popover-open .operations tbody tr')].map(r => r.innerText.split(/\\s+/))"
    )
    assert [row[:2] for row in rows] == [["attention", "NATIVE"], ["rms_norm", "COMPOSITE"]]
    assert color(browser, ":popover-open .NATIVE") != color(browser, ":popover-open .COMPOSITE")
    browser.screenshot(tmp_path / "open.png")
    assert len(set(pixels(tmp_path / "open.png"))) > 200
    browser.click(":popover-open .close")
    assert browser.evaluate("document.querySelectorAll('[popover]:popover-open').length") == 0


@needs_browser
def test_every_cell_is_reached_and_opened_by_keys(browser: Chromium, page: Path) -> None:
    browser.open(page.as_uri() + "#keys")
    reached = []
    for _ in range(browser.evaluate("document.querySelectorAll('.matrix button').length")):
        browser.press("Tab", 9)
        reached.append(browser.evaluate("document.activeElement.getAttribute('popovertarget')"))
    wanted = browser.evaluate(
        "[...document.querySelectorAll('.matrix button')].map(b => b.getAttribute('popovertarget'))"
    )
    assert reached == wanted and len(wanted) >= 7
    browser.press("Enter", 13)
    assert browser.evaluate("document.querySelector('[popover]:popover-open').id") == reached[-1]
    browser.press("Escape", 27)
    assert browser.evaluate("document.querySelectorAll('[popover]:popover-open').length") == 0
    focus = browser.evaluate("document.activeElement.getAttribute('popovertarget')")
    assert focus == reached[-1], "the focus comes back to the cell"


@needs_browser
def test_failures_and_the_trend_stand_on_the_page_itself(browser: Chromium, page: Path) -> None:
    browser.open(page.as_uri() + "#trend")
    trend = browser.evaluate("document.querySelector('.trend').innerText")
    for part in ("New failures: 1", "L3/abort/llama", "Nearer to their bound: 1", "0.500", "0.930"):
        assert part in trend, part


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_picture_is_not_blank_and_fits_its_width(
    browser: Chromium, page: Path, tmp_path: Path, width: int, height: int
) -> None:
    browser.open(f"{page.as_uri()}#{width}", width=width, height=height)
    browser.screenshot(tmp_path / "page.png")
    rows = pixels(tmp_path / "page.png")
    assert len(rows) == height and len(set(rows)) > height // 4
    assert browser.evaluate("document.documentElement.scrollWidth") <= width

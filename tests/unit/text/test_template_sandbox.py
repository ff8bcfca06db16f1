"""Templates are programs: whatever they do, they end, stay in bounds, and fail with a TemplateError."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from core.errors import TemplateError
from core.text.owned_text import ASSISTANT, FOREIGN, TEMPLATE, OwnedText, mask_of
from core.text.template_renderer import TemplateRenderer, TemplateStoppedError


@pytest.fixture(scope="module")
def hurried() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(time_limit_s=2.0, max_chars=100_000)
    yield renderer
    renderer.close()


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 7 ** 99999999 }}",
]
HUGE = [
    "{{ 'x' * 10 ** 10 }}",
    "{% set n = namespace(x='0123456789') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% for i in range(99999) %}0123456789{% endfor %}",
    "{{ '%1000000000d' % 5 }}",
    "{{ [0] * 10 ** 10 }}",
]
WRONG = [
    "{% for x in %}",
    "{{ a.b.c }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no system role') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include 'x' %}",
    "{{ 1 / 0 }}",
    "{{ messages.append(1) }}",
    "{{ namespace(__init__=1) }}",
    "{{ strftime_now(5) }}",
    "{{ messages | nofilter }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_does_not_end_is_stopped(hurried: TemplateRenderer, source: str) -> None:
    start = time.monotonic()
    with pytest.raises(TemplateStoppedError, match="2 s"):
        hurried.render(source, {}, {})
    assert time.monotonic() - start < 30
    assert hurried.render("{{ x }}", {}, {"x": "next"}).text == "next"


@pytest.mark.parametrize("source", HUGE)
def test_a_template_that_grows_without_bound_is_refused(hurried: TemplateRenderer, source: str) -> None:
    with pytest.raises(TemplateError, match=r"memory|longer|stopped|failed"):
        hurried.render(source, {}, {})
    assert hurried.render("{{ x }}", {}, {"x": "next"}).text == "next"


@pytest.mark.parametrize("source", WRONG)
def test_errors_of_a_template_are_errors_of_the_request(renderer: TemplateRenderer, source: str) -> None:
    with pytest.raises(TemplateError, match="chat template failed") as caught:
        renderer.render(source, {}, {"messages": []})
    assert caught.value.status == 400
    assert "Traceback" not in str(caught.value)


def test_values_that_are_no_json_are_refused(renderer: TemplateRenderer) -> None:
    with pytest.raises(TemplateError, match="plain JSON"):
        renderer.render("x", {}, {"x": object()})


def test_a_killed_worker_is_replaced() -> None:
    renderer = TemplateRenderer(time_limit_s=60.0)
    assert renderer.render("a", {}, {}).text == "a"
    for worker in renderer._idle:
        worker.process.kill()
        worker.process.wait()
    assert renderer.render("b", {}, {}).text == "b"
    renderer.close()
    assert renderer._idle == []


def test_owners_are_known_to_the_character(renderer: TemplateRenderer) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    source = "x{{ t }}{% for m in messages %}{{ m.role[:1] ~ m.content }}{% endfor %}"
    rendered = renderer.render(source, {"t": "y"}, {"messages": messages})
    assert rendered.text == "xyuuaa"
    assert rendered.mask == TEMPLATE * 3 + FOREIGN + TEMPLATE + ASSISTANT


MIXED = OwnedText("ab cd\n", TEMPLATE * 3 + FOREIGN * 3)


@pytest.mark.parametrize(
    ("result", "text", "mask"),
    [
        (MIXED + "x", "ab cd\nx", TEMPLATE * 3 + FOREIGN * 4),
        ("x" + MIXED, "xab cd\n", FOREIGN + TEMPLATE * 3 + FOREIGN * 3),
        (MIXED[1:4], "b c", TEMPLATE * 2 + FOREIGN),
        (MIXED[-1], "\n", FOREIGN),
        (MIXED.strip(), "ab cd", TEMPLATE * 3 + FOREIGN * 2),
        (MIXED.lstrip("a"), "b cd\n", TEMPLATE * 2 + FOREIGN * 3),
        (MIXED.split()[1], "cd", FOREIGN * 2),
        (MIXED.split(" ")[0], "ab", TEMPLATE * 2),
        (MIXED.splitlines()[0], "ab cd", TEMPLATE * 3 + FOREIGN * 2),
        (MIXED.replace("cd", OwnedText.whole("!")), "ab !\n", TEMPLATE * 4 + FOREIGN),
        (MIXED.replace("", "-"), "-a-b- -c-d-\n-", FOREIGN * 13),
        (MIXED.upper(), "AB CD\n", TEMPLATE * 3 + FOREIGN * 3),
        (OwnedText.whole("ß").upper(), "SS", FOREIGN * 2),
        (OwnedText.whole("-").join(["a", "b"]), "a-b", FOREIGN + TEMPLATE + FOREIGN),
        (OwnedText.whole("<%s>") % "u", "<u>", TEMPLATE + FOREIGN + TEMPLATE),
        (OwnedText.whole("%d!") % 5, "5!", FOREIGN * 2),
        (OwnedText.whole("ab").center(4), " ab ", FOREIGN * 4),
        (MIXED.removeprefix("ab"), " cd\n", TEMPLATE + FOREIGN * 3),
        (MIXED.removesuffix("d\n"), "ab c", TEMPLATE * 3 + FOREIGN),
        (MIXED * 2, "ab cd\nab cd\n", (TEMPLATE * 3 + FOREIGN * 3) * 2),
    ],
)
def test_string_operations_keep_owners_or_forget_them(result: str, text: str, mask: bytes) -> None:
    assert (result, mask_of(result)) == (text, mask)

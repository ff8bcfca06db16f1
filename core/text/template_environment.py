"""The Jinja environment of chat templates: sandboxed, bounded, and aware of who wrote which character.

Behaves as the environment that published templates are written for (transformers): `trim_blocks`, `lstrip_blocks`,
loop controls, `tojson`, `raise_exception`, `strftime_now` and the `generation` tag.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from core.text.owned_text import ASSISTANT, OwnedMarkup, OwnedText, join_text, mask_of

__all__ = ["KNOWN_ROLES", "TemplateEnvironment", "render_owned"]

KNOWN_ROLES = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "environment", "documents"}
)
"""Role words that templates may build into control tokens ("<|" + role + "|>")."""

_SPOKEN_FIELDS = ("content", "reasoning_content", "reasoning", "thinking")
_REBOUND = frozenset({"replace", "join"})


class _OwningCodeGenerator(CodeGenerator):
    """Compiles every literal of the template into text that the template owns."""

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"environment.own({str.__repr__(value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._literal, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(self._literal(item) + ', ' for item in value)})"
        if isinstance(value, dict):
            pairs = (f"{self._literal(key)}: {self._literal(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        return repr(value)

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        self.write(self._literal(node.as_const(frame.eval_ctx)))

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._literal(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(map(str, group)))


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is printed as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()


class _PublicNamespace(Namespace):
    """A namespace without underscore names, which could reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}; leave out the underscore")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates whose output is OwnedText. Holds no state of a conversation."""

    code_generator_class = _OwningCodeGenerator
    concat = staticmethod(join_text)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._literals: dict[str, OwnedText] = {}
        self.filters.update(tojson=_tojson, join=_join, replace=_replace, indent=_indent, safe=_safe)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PublicNamespace, dict=_make_dict
        )
        del self.globals["lipsum"]

    def own(self, text: str) -> OwnedText:
        """A literal of the template; one object is kept for each."""
        known = self._literals.get(text)
        if known is None:
            known = self._literals[text] = OwnedText.whole(text)
        return known

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls as the sandbox allows; methods of plain strings keep what their arguments own."""
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, types.BuiltinMethodType) and type(owner) is str and obj.__name__ in _REBOUND:
            obj = getattr(OwnedText(owner), obj.__name__)
        return super().call(context, obj, *args, **kwargs)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = (environment.getattr(item, attribute) for item in value)
    return join_text(value, d)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text = text if isinstance(text, str) else str(text)
    return OwnedText.replace(
        text if isinstance(text, OwnedText) else OwnedText(text), old, new, -1 if count is None else count
    )


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * width
    lines = (text + "\n").splitlines()
    shown = [
        line if (index == 0 and not first) or not (line or blank) else margin + line for index, line in enumerate(lines)
    ]
    return join_text(shown, "\n")


def _safe(value: Any) -> OwnedMarkup:
    text = value if isinstance(value, str) else str(value)
    return OwnedMarkup(text, mask_of(text))


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _with_owners(messages: Any) -> Any:
    """The messages with the template's role words, of which it builds control tokens, and the assistant's words."""
    if not isinstance(messages, list):
        return messages
    return [_owned_message(message) if isinstance(message, dict) else message for message in messages]


def _owned_message(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not (isinstance(role, str) and role in KNOWN_ROLES):
        return message
    out = {**message, "role": OwnedText.whole(role)}
    if role == "assistant":
        out.update({field: _spoken(message[field]) for field in _SPOKEN_FIELDS if field in message})
    return out


def _spoken(value: Any) -> Any:
    if isinstance(value, str):
        return OwnedText.whole(value, ASSISTANT)
    if isinstance(value, list):
        return [{**part, "text": _spoken(part["text"])} if _is_text_part(part) else part for part in value]
    return value


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def render_owned(
    template: jinja2.Template, owned: Mapping[str, str], values: Mapping[str, Any], max_chars: int
) -> tuple[str, bytes]:
    """Text of a rendered template, and the owner of each character.

    Args:
        template: Made by a TemplateEnvironment.
        owned: Variables that count as the template's own (special tokens).
        values: Variables from the request.
        max_chars: Longest output.

    Raises:
        jinja2.TemplateError, and whatever else a template can raise.
        OverflowError: the output is longer than `max_chars`.
    """
    variables: dict[str, Any] = {name: OwnedText.whole(text) for name, text in owned.items()}
    variables.update(values)
    variables["messages"] = _with_owners(values.get("messages"))
    pieces: list[str] = []
    length = 0
    for piece in template.root_render_func(template.new_context(variables)):
        length += len(piece)
        if length > max_chars:
            raise OverflowError(f"the prompt is longer than {max_chars} characters")
        pieces.append(piece)
    text = join_text(pieces)
    return str.__str__(text), text.mask if isinstance(text, OwnedText) else b"\0" * length

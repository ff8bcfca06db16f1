"""Strings that remember who wrote each of their characters: the chat template, the assistant, or anybody else.

Ownership fails closed: an operation that is not handled here gives a plain string, which nobody owns. So losing track
can only turn a control token into ordinary text, and never a user's text into a control token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

__all__ = ["ASSISTANT", "FOREIGN", "TEMPLATE", "OwnedMarkup", "OwnedText", "join_text", "mask_of"]

FOREIGN = b"\0"
"""Written by a user, a tool, or nobody knows whom."""
TEMPLATE = b"\1"
"""Written by the chat template: may spell any token."""
ASSISTANT = b"\2"
"""Said by the assistant earlier: may spell the model's markup ("<think>"), not its control tokens."""


def mask_of(text: str) -> bytes:
    """One byte for each character of `text`: its owner."""
    return text.mask if isinstance(text, OwnedText) else FOREIGN * len(text)


def join_text(parts: Iterable[Any], separator: str = "") -> str:
    """`separator.join(str(part) for part in parts)`, ownership kept."""
    texts: list[str] = []
    for part in parts:
        if texts and separator:
            texts.append(separator)
        texts.append(part if isinstance(part, str) else str(part))
    if not any(isinstance(text, OwnedText) for text in texts):
        return "".join(texts)
    return OwnedText("".join(texts), b"".join(map(mask_of, texts)))


class OwnedText(str):
    """A string with the owner of each character. Equal to, and hashed as, the plain string.

    Args:
        text: The characters.
        mask: One byte for each of them, its owner; None means that all are foreign.
    """

    __slots__ = ("mask",)
    mask: bytes

    def __new__(cls, text: str, mask: bytes | None = None) -> OwnedText:
        self = super().__new__(cls, text)
        self.mask = FOREIGN * len(text) if mask is None else mask
        assert len(self.mask) == len(self), "a mask has one byte for each character"
        return self

    @classmethod
    def whole(cls, text: str, owner: bytes = TEMPLATE) -> OwnedText:
        """`text`, every character of one owner."""
        return cls(text, owner * len(text))

    def __str__(self) -> str:
        # Jinja calls str() on all that it prints; the plain string would forget its owner.
        return self

    def __add__(self, other: str) -> OwnedText:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented  # markup of the `safe` filter escapes what it is added to, as templates expect
        return OwnedText(str.__add__(self, other), self.mask + mask_of(other))

    def __radd__(self, other: str) -> OwnedText:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented  # markup of the `safe` filter escapes what it is added to, as templates expect
        return OwnedText(str.__add__(other, self), mask_of(other) + self.mask)

    def __mul__(self, count: SupportsIndex) -> OwnedText:
        return OwnedText(str.__mul__(self, count), self.mask * int(count))

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> OwnedText:
        text = str.__getitem__(self, key)
        return type(self)(text, self.mask[key] if isinstance(key, slice) else bytes([self.mask[key]]))

    def __mod__(self, values: Any) -> str:
        return format_text(self, values)

    def lstrip(self, chars: str | None = None, /) -> OwnedText:
        """As `str.lstrip`, ownership kept."""
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> OwnedText:
        """As `str.rstrip`, ownership kept."""
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> OwnedText:
        """As `str.strip`, ownership kept."""
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> OwnedText:
        """As `str.removeprefix`, ownership kept."""
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> OwnedText:
        """As `str.removesuffix`, ownership kept."""
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As `str.split`, ownership kept."""
        return self._located(str.split(self, sep, maxsplit))

    def splitlines(self, keepends: bool = False) -> list[str]:
        """As `str.splitlines`, ownership kept."""
        whole = self._located(str.splitlines(self, True))
        return (
            whole if keepends else [line[: len(plain)] for line, plain in zip(whole, str.splitlines(self), strict=True)]
        )

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """As `str.replace`, ownership kept."""
        if not old:
            return str.replace(self, old, new, count)
        return join_text(self.split(old, count), new)

    def join(self, parts: Iterable[str], /) -> str:
        """As `str.join`, ownership kept."""
        return join_text(parts, self)

    def upper(self) -> str:
        """As `str.upper`, ownership kept."""
        return self._recased(str.upper(self))

    def lower(self) -> str:
        """As `str.lower`, ownership kept."""
        return self._recased(str.lower(self))

    def title(self) -> str:
        """As `str.title`, ownership kept."""
        return self._recased(str.title(self))

    def capitalize(self) -> str:
        """As `str.capitalize`, ownership kept."""
        return self._recased(str.capitalize(self))

    def _recased(self, text: str) -> str:
        return OwnedText(text, self.mask) if len(text) == len(self) else text

    def _located(self, parts: list[str]) -> list[str]:
        """`parts` as slices of this string; they occur in it in this order, without overlap."""
        out: list[str] = []
        position = 0
        for part in parts:
            position = self.find(part, position)
            out.append(self[position : position + len(part)])
            position += len(part)
        return out


class OwnedMarkup(OwnedText):
    """Text that the `safe` filter marked as HTML: what is added to it is escaped, as templates expect of Jinja."""

    __slots__ = ()

    def __html__(self) -> str:
        return self

    def __add__(self, other: str) -> OwnedText:
        if not isinstance(other, str):
            return NotImplemented
        other = _escaped(other)
        return OwnedMarkup(str.__add__(self, other), self.mask + mask_of(other))

    def __radd__(self, other: str) -> OwnedText:
        if not isinstance(other, str):
            return NotImplemented
        other = _escaped(other)
        return OwnedMarkup(str.__add__(other, self), mask_of(other) + self.mask)


_ESCAPES = {"&": "&amp;", ">": "&gt;", "<": "&lt;", "'": "&#39;", '"': "&#34;"}


def _escaped(text: str) -> str:
    if hasattr(text, "__html__"):
        return text
    mask = mask_of(text)
    parts = [_ESCAPES.get(char, char) for char in str.__str__(text)]
    return OwnedText("".join(parts), b"".join(mask[i : i + 1] * len(part) for i, part in enumerate(parts)))


def format_text(pattern: OwnedText, values: Any) -> str:
    """`pattern % values`; ownership is kept where the pattern has `%s` alone."""
    text = str.__mod__(pattern, values)
    pieces = pattern.split("%s")
    arguments = values if isinstance(values, tuple) else (values,)
    if any("%" in piece for piece in pieces) or len(pieces) != len(arguments) + 1:
        return text
    parts: list[Any] = [pieces[0]]
    for argument, piece in zip(arguments, pieces[1:], strict=True):
        parts += [argument, piece]
    return join_text(parts)

"""The tokenizer that everything above shares: text to ids and ids to bytes, with or without special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import tokenizers

from core.errors import InvalidRequestError
from core.text.marked_encoding import MarkedEncoder
from core.text.token_pieces import marks_spaces, piece_decoder, strips_leading_space
from core.text.unlocked_encoding import encode_unlocked

__all__ = ["Tokenizer", "TokenizerInfo", "count_token_ids", "load_tokenizer"]

_CONTROL_SHAPE = re.compile(r"<\|.*\|>|<｜.*｜>|</?s>|<(?:bos|eos|pad|unk|mask|unused\d+)>|\[/?[A-Z_]+\]", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """What a model's files say beside the vocabulary.

    Args:
        special_tokens: Text by name ("bos_token", "eos_token", "pad_token", ...), as templates see them.
        eos_token_ids: Ids that end a text or a turn, without repeats.
        add_bos: Whether BOS is put before raw prompts; None leaves it to the tokenizer's post-processor.
        add_eos: Whether EOS is put after raw prompts; None leaves it to the tokenizer's post-processor.
        chat_template: One template, several by name, or None.
        vocab_size: One above the highest token id; 0 asks the vocabulary, which is slow for a large one.
        source: Where it came from, for messages.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_template: str | dict[str, str] | None = None
    vocab_size: int = 0
    source: str = ""


def _checked_text(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidRequestError(f"text to tokenize must be a string, got {type(text).__name__}", param="prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text holds half of a surrogate pair at character {error.start}; send well-formed Unicode",
            param="prompt",
        ) from None
    return text


class Tokenizer:
    """Text to token ids and back. Immutable after construction; methods may be called from several threads.

    Args:
        backend: The tokenizer of the `tokenizers` library; the Tokenizer owns it from here on.
        info: What the model's files say beside it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, info: TokenizerInfo) -> None:
        self._backend = backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self.info = info
        self._added = backend.get_added_tokens_decoder()
        self._piece_bytes = piece_decoder(backend)
        self._marks_spaces = marks_spaces(backend)
        self._bytes_of: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a model folder (tokenizer.json, or tokenizer.model through transformers).

        Raises:
            ModelNotFoundError: the folder holds no tokenizer.
            ModelLoadError: its files are damaged.
        """
        from core.text.tokenizer_files import read_folder

        return cls(*read_folder(Path(path)))

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata; tensors are not read.

        Raises:
            ModelNotFoundError: there is no such file.
            ModelLoadError: the file is damaged or its kind of tokenizer is not known.
        """
        from core.text.tokenizer_files import read_gguf

        return cls(*read_gguf(Path(path)))

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The model's own chat template, several by name, or None."""
        return self.info.chat_template

    @cached_property
    def vocab_size(self) -> int:
        """One above the highest token id."""
        if self.info.vocab_size:
            return self.info.vocab_size
        # Not the number of entries: a vocabulary may leave ids empty.
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, or None."""
        return self._named_id("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text or a turn, the tokenizer's own EOS first."""
        return self.info.eos_token_ids

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens: left out of text with `skip_special_tokens`."""
        flagged = {token_id for token_id, token in self._added.items() if token.special}
        named = {self._backend.token_to_id(text) for text in self.info.special_tokens.values()}
        return frozenset(flagged | {token_id for token_id in named if token_id is not None})

    @cached_property
    def protected_ids(self) -> frozenset[int]:
        """Ids that a user's characters never become: `special_ids`, and added tokens of the shape of control tokens."""
        shaped = {i for i, token in self._added.items() if _CONTROL_SHAPE.fullmatch(token.content)}
        return self.special_ids | shaped

    @property
    def added_tokens(self) -> Mapping[int, tokenizers.AddedToken]:
        """Tokens that are found in text before it is cut into pieces, by id. Read-only."""
        return self._added

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        return token_id in self.special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt; special tokens that are spelled in the text become special tokens.

        Args:
            add_special_tokens: Put BOS (or what the model wants) around it.

        Raises:
            InvalidRequestError: the text is not well-formed Unicode.
        """
        by_flags = self.info.add_bos is not None or self.info.add_eos is not None
        use_processor = add_special_tokens and not by_flags
        ids = encode_unlocked(self._backend, _checked_text(text), add_special_tokens=use_processor)
        if not (add_special_tokens and by_flags):
            return ids
        return [*self._ends("bos_token", self.info.add_bos), *ids, *self._ends("eos_token", self.info.add_eos)]

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a user's text: characters that spell a special token stay characters. Nothing is added around it.

        Raises:
            InvalidRequestError: the text is not well-formed Unicode.
        """
        return self.encode_marked([(text, False)])

    def encode_marked(self, spans: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of one text that has several owners, merged over the borders as if it had one.

        Args:
            spans: (text, owned) in order. A protected token is made only where all its characters are owned.

        Raises:
            InvalidRequestError: the text is not well-formed Unicode.
        """
        mask = b"".join((b"\1" if owned else b"\0") * len(part) for part, owned in spans)
        return self.encode_masked("".join(part for part, _ in spans), mask)

    def encode_masked(self, text: str, mask: bytes, markup: frozenset[int] = frozenset()) -> list[int]:
        """Ids of `text`, one owner for each character in `mask` (see `core.text.owned_text`).

        Args:
            markup: Further ids that a user's characters never become, but an assistant's do.

        Raises:
            InvalidRequestError: the text is not well-formed Unicode.
        """
        _checked_text(text)
        encoder = self._encoders.get(markup)
        if encoder is None:
            encoder = MarkedEncoder(self._backend, self._added, self.protected_ids, markup - self.protected_ids)
            self._encoders[markup] = encoder
        return encoder.encode(text, mask)

    @cached_property
    def _encoders(self) -> dict[frozenset[int], MarkedEncoder]:
        return {}

    def token_to_id(self, text: str) -> int | None:
        """Id of the vocabulary entry spelled exactly so, or None."""
        return self._backend.token_to_id(text)

    def token_piece(self, token_id: int) -> str:
        """The vocabulary entry as stored ("Ġworld", "▁world", "<0x0A>").

        Raises:
            InvalidRequestError: there is no such id.
        """
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if piece is None:
            raise InvalidRequestError(
                f"token id {token_id} is not in the vocabulary; ids must be in [0, {self.vocab_size})", param="prompt"
            )
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes that the token stands for in running text; special tokens give their own spelling.

        Raises:
            InvalidRequestError: there is no such id.
        """
        known = self._bytes_of.get(token_id)
        if known is None:
            added = self._added.get(token_id)
            known = self._added_bytes(added) if added is not None else self._piece_bytes(self.token_piece(token_id))
            self._bytes_of[token_id] = known
        return known

    def _added_bytes(self, token: tokenizers.AddedToken) -> bytes:
        # Runs of spaces are added tokens in some vocabularies, stored with the space mark.
        text = token.content if token.special or not self._marks_spaces else token.content.replace("▁", " ")
        return text.encode("utf-8")

    def token_text(self, token_id: int) -> str:
        """The token as people read it; bytes that are no whole characters show as U+FFFD.

        Raises:
            InvalidRequestError: there is no such id.
        """
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; invalid bytes show as U+FFFD, and a space put in front by encoding is dropped.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        shown = [token_id for token_id in token_ids if not (skip_special_tokens and token_id in self.special_ids)]
        for token_id in token_ids:
            self.token_bytes(token_id)
        data = b"".join(map(self.token_bytes, shown))
        if self.strips_leading_space and shown and shown[0] not in self._added and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    @cached_property
    def strips_leading_space(self) -> bool:
        """Whether a text's first space is one that encoding put there."""
        return strips_leading_space(self._backend)

    def _named_id(self, name: str) -> int | None:
        text = self.info.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _ends(self, name: str, wanted: bool | None) -> list[int]:
        token_id = self._named_id(name) if wanted else None
        return [] if token_id is None else [token_id]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model: of a GGUF file, or of a folder (its tokenizer.json before a .gguf in it).

    Raises:
        ModelNotFoundError: nothing there holds a tokenizer.
        ModelLoadError: the files are damaged.
    """
    from core.text.tokenizer_files import read_any

    return Tokenizer(*read_any(Path(path)))


def count_token_ids(path: str | Path) -> int:
    """`vocab_size` of the tokenizer at `path`, in a fraction of the time and memory that building it takes.

    Raises:
        ModelNotFoundError: nothing there holds a tokenizer.
        ModelLoadError: the files are damaged.
    """
    from core.text.tokenizer_files import read_vocab_size

    known = read_vocab_size(Path(path))
    return known if known is not None else load_tokenizer(path).vocab_size

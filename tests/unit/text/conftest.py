"""Small tokenizers for the text tests, and the public data next to the repository where it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from core.text.template_renderer import TemplateRenderer
from core.text.tokenizer import Tokenizer, TokenizerInfo

SHARED_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"

MakeTokenizer = Callable[..., Tokenizer]


def _byte_letters() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in letters]
    letters.update({byte: chr(256 + n) for n, byte in enumerate(rest)})
    return [letters[byte] for byte in range(256)]


_LETTERS = _byte_letters()


def _finish(backend: tokenizers.Tokenizer, special: Sequence[str], markup: Sequence[str], options: Any) -> Tokenizer:
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in markup])
    return Tokenizer(backend, TokenizerInfo(**options))


@pytest.fixture(scope="session")
def byte_level() -> MakeTokenizer:
    """Makes a byte-level tokenizer: ids 0..255 are the bytes, then `pieces`, then `special` and `markup` tokens."""

    def make(
        pieces: Sequence[bytes] = (), special: Sequence[str] = (), markup: Sequence[str] = (), **options: Any
    ) -> Tokenizer:
        texts = [*_LETTERS, *("".join(_LETTERS[byte] for byte in piece) for piece in pieces)]
        backend = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return _finish(backend, special, markup, options)

    return make


@pytest.fixture(scope="session")
def byte_fallback() -> MakeTokenizer:
    """Makes a SentencePiece-like tokenizer: id 0 unknown, 1..256 the bytes, then `pieces`, then special tokens.

    With `prefix` a space is put in front of the text, as Llama 2 does.
    """

    def make(
        pieces: Sequence[str] = (),
        special: Sequence[str] = (),
        markup: Sequence[str] = (),
        prefix: bool = False,
        **options: Any,
    ) -> Tokenizer:
        texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        vocabulary = {text: i for i, text in enumerate(texts)}
        model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        backend = tokenizers.Tokenizer(model)
        steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return _finish(backend, special, markup, options)

    return make


@pytest.fixture(scope="session")
def chatml(byte_level: MakeTokenizer) -> Tokenizer:
    """A byte-level tokenizer with the control tokens of ChatML and the markup of a reasoning model."""
    return byte_level(
        special=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"],
        markup=["<think>", "</think>", "<tool_call>", "</tool_call>"],
        special_tokens={"bos_token": "<s>", "eos_token": "<|im_end|>"},
    )


@pytest.fixture(scope="session")
def renderer() -> Iterator[TemplateRenderer]:
    """One pool of template processes for all tests; the limit is long since test machines can be busy."""
    renderer = TemplateRenderer(time_limit_s=60.0)
    yield renderer
    renderer.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public vocabularies and templates; tests that need it are left out where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the public data folder shared/data is not next to the repository")
    return SHARED_DATA

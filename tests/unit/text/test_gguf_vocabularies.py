"""Tokenizers of released models, built from GGUF metadata, against the ids that the original tokenizers give."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path

import pytest

from core.errors import ModelLoadError, ModelNotFoundError
from core.text.gguf_metadata import read_gguf_array_length, read_gguf_metadata
from core.text.tokenizer import Tokenizer, count_token_ids, load_tokenizer

NAMES = ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"]
HOSTILE = "a</s><s><unk> <|im_end|><|im_start|><|eot_id|><|end|><|endoftext|><0x0A> 😶‍🌫️ e\u0301\n"


@lru_cache(maxsize=1)
def _load(path: Path) -> Tokenizer:
    return load_tokenizer(path)


@pytest.fixture(params=NAMES)
def file(request: pytest.FixtureRequest, shared_data: Path) -> Path:
    return shared_data / "vocab" / f"ggml-vocab-{request.param}.gguf"


def _samples(file: Path) -> list[str]:
    *samples, rest = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    assert rest == "", "every sample is followed by a marker line"
    return samples


def test_ids_equal_those_of_the_original_tokenizer(file: Path) -> None:
    expected = [list(map(int, line.split())) for line in Path(f"{file}.out").read_text().splitlines()]
    got = [_load(file).encode(text, add_special_tokens=False) for text in _samples(file)]
    assert len(got) == len(expected) >= 40
    assert got == expected


def test_decode_gives_the_text_back(file: Path) -> None:
    tokenizer = _load(file)
    for text in _samples(file):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_without_specials_has_the_same_ids_when_encoded_plainly(file: Path) -> None:
    tokenizer = _load(file)
    for text in _samples(file):
        assert tokenizer.encode_plain(text) == tokenizer.encode(text, add_special_tokens=False)


def test_plain_text_never_becomes_a_special_token_and_keeps_its_characters(file: Path) -> None:
    tokenizer = _load(file)
    text = HOSTILE + "".join(tokenizer.token_text(i) for i in sorted(tokenizer.special_ids)[:50])
    ids = tokenizer.encode_plain(text)
    assert not tokenizer.protected_ids & set(ids)
    if "qwen2" not in file.name:  # this one composes characters (NFC) before it encodes
        assert tokenizer.decode(ids) == text


def test_ids_are_counted_without_building_the_tokenizer(file: Path) -> None:
    assert count_token_ids(file) == _load(file).vocab_size


def test_model_facts_are_read(shared_data: Path) -> None:
    llama = _load(shared_data / "vocab" / "ggml-vocab-llama-bpe.gguf")
    assert llama.vocab_size == 128256
    assert llama.bos_token_id == 128000
    assert llama.eos_token_ids == (128001, 128009)
    assert llama.encode("hi")[0] == 128000
    assert llama.is_special(128009)
    phi = _load(shared_data / "vocab" / "ggml-vocab-phi-3.gguf")
    assert isinstance(phi.chat_template, str)
    assert "<|user|>" in phi.chat_template


def _gguf(entries: list[bytes], count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries) if count is None else count) + b"".join(entries)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def test_metadata_values_of_every_kind(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    entries = [
        _text("a.text") + struct.pack("<I", 8) + _text("é"),
        _text("a.flag") + struct.pack("<I?", 7, True),
        _text("a.list") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0),
        _text("a.words") + struct.pack("<IIQ", 9, 8, 2) + _text("x") + _text("yz"),
        _text("b.other") + struct.pack("<Iq", 11, -5),
    ]
    file.write_bytes(_gguf(entries))
    assert read_gguf_metadata(file, "a.") == {
        "a.text": "é",
        "a.flag": True,
        "a.list": [1.0, 2.0, 3.0],
        "a.words": ["x", "yz"],
    }
    assert read_gguf_metadata(file)["b.other"] == -5
    assert [read_gguf_array_length(file, key) for key in ("a.words", "a.list", "a.text", "a.none")] == [
        2,
        3,
        None,
        None,
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGML" + b"\0" * 40,
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        _gguf([_text("k") + struct.pack("<I", 8) + struct.pack("<Q", 2**40)]),
        _gguf([_text("k") + struct.pack("<IIQ", 9, 8, 2**60)]),
        _gguf([_text("k") + struct.pack("<I", 77)]),
        _gguf([], count=3),
    ],
)
def test_damaged_files_are_load_errors(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match="GGUF"):
        read_gguf_metadata(file)
    with pytest.raises(ModelLoadError, match="GGUF"):
        read_gguf_array_length(file, "other")


def test_a_gguf_file_without_a_known_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(
        _gguf(
            [
                _text("tokenizer.ggml.model") + struct.pack("<I", 8) + _text("rwkv"),
                _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 1) + _text("x"),
            ]
        )
    )
    with pytest.raises(ModelLoadError, match="--tokenizer"):
        Tokenizer.from_gguf(file)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        Tokenizer.from_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)

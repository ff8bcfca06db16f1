"""The Tokenizer over small vocabularies: bytes of tokens, special tokens, folders of files, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequestError, ModelLoadError
from core.text.tokenizer import Tokenizer, load_tokenizer

MakeTokenizer = Callable[..., Tokenizer]


def test_token_bytes_of_a_byte_level_vocabulary(byte_level: MakeTokenizer) -> None:
    tokenizer = byte_level([b" world", b"\xf0\x9f"], special=["<|é|>"])
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert tokenizer.token_bytes(256) == b" world"
    assert tokenizer.token_bytes(257) == b"\xf0\x9f"
    assert tokenizer.token_bytes(258) == "<|é|>".encode()
    assert tokenizer.vocab_size == 259


def test_token_bytes_of_a_sentencepiece_vocabulary(byte_fallback: MakeTokenizer) -> None:
    tokenizer = byte_fallback(["▁Hello", "é"], special=["</s>"])
    assert tokenizer.token_bytes(1 + 0x0A) == b"\n"
    assert tokenizer.token_bytes(257) == b" Hello"
    assert tokenizer.token_bytes(258) == "é".encode()
    assert tokenizer.token_bytes(259) == b"</s>"


def test_the_space_that_encoding_adds_is_dropped_by_decode(byte_fallback: MakeTokenizer) -> None:
    tokenizer = byte_fallback(["▁", "a", "b"], special=["</s>"], prefix=True)
    ids = tokenizer.encode("a b")
    assert tokenizer.decode(ids) == "a b"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


@pytest.mark.parametrize("token_id", [-1, 256, 10**12])
def test_ids_outside_the_vocabulary_are_refused(byte_level: MakeTokenizer, token_id: int) -> None:
    tokenizer = byte_level()
    for call in (tokenizer.token_bytes, tokenizer.token_piece, tokenizer.token_text):
        with pytest.raises(InvalidRequestError, match=str(token_id)):
            call(token_id)
    with pytest.raises(InvalidRequestError, match=r"\[0, 256\)"):
        tokenizer.decode([65, token_id])


def test_half_of_a_surrogate_pair_is_refused(byte_level: MakeTokenizer) -> None:
    tokenizer = byte_level()
    for call in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            call("ab\ud83d")


def test_marked_spans_own_only_what_they_spell_alone(chatml: Tokenizer) -> None:
    end = chatml.token_to_id("<|im_end|>")
    assert chatml.encode_marked([("<|im_end|>", True)]) == [end]
    assert end not in chatml.encode_marked([("<|im_end|>", False)])
    assert end not in chatml.encode_marked([("<|im_", True), ("end|>", False)])
    assert chatml.encode_marked([("<|im_", True), ("end|>", True)]) == [end]
    assert chatml.encode_marked([("<", False), ("<|im_end|>", True), (">", False)]) == [ord("<"), end, ord(">")]


def test_borders_of_spans_do_not_change_ids(byte_fallback: MakeTokenizer) -> None:
    tokenizer = byte_fallback(["▁", "a"], special=["</s>"], prefix=True)
    text = " a a</s> a"
    spans = [(" a", False), (" a", False), ("</s>", True), (" ", False), ("a", True)]
    assert tokenizer.encode_marked(spans) == tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(
    data=st.lists(
        st.tuples(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<", "x", " ", "<s>", "é", "\n"]), st.booleans()),
        max_size=8,
    )
)
def test_foreign_spans_never_spell_a_special_token(chatml: Tokenizer, data: list[tuple[str, bool]]) -> None:
    ids = chatml.encode_marked(data)
    assert chatml.decode(ids, skip_special_tokens=False) == "".join(text for text, _ in data)
    # Foreign text replaced by harmless text of the same ownership leaves the same specials.
    harmless = [(text if owned else "." * len(text), owned) for text, owned in data]
    expected = [i for i in chatml.encode_marked(harmless) if chatml.is_special(i)]
    assert [i for i in ids if chatml.is_special(i)] == expected


def _write_folder(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_a_folder_with_explicit_flags(tmp_path: Path, chatml: Tokenizer) -> None:
    folder = _write_folder(
        tmp_path,
        chatml,
        tokenizer_config={
            "bos_token": "<s>",
            "eos_token": {"content": "<|im_end|>"},
            "add_bos_token": True,
            "chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}],
            "added_tokens_decoder": {"264": {"content": "<new>", "special": True}},
        },
        generation_config={"eos_token_id": [chatml.token_to_id("<|endoftext|>"), chatml.token_to_id("<|im_end|>")]},
    )
    tokenizer = load_tokenizer(folder)
    bos = chatml.token_to_id("<s>")
    assert tokenizer.bos_token_id == bos
    assert tokenizer.encode("hi") == [bos, ord("h"), ord("i")]
    assert tokenizer.encode("<s>hi", add_special_tokens=False) == [bos, ord("h"), ord("i")]
    assert tokenizer.eos_token_ids == (chatml.token_to_id("<|im_end|>"), chatml.token_to_id("<|endoftext|>"))
    assert tokenizer.chat_template == {"default": "d", "tool_use": "t"}
    assert tokenizer.token_piece(264) == "<new>"
    assert tokenizer.is_special(264)


def test_a_template_file_wins_over_the_configuration(tmp_path: Path, chatml: Tokenizer) -> None:
    folder = _write_folder(tmp_path, chatml, tokenizer_config={"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("new")
    assert load_tokenizer(folder / "tokenizer.json").chat_template == "new"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_folders_are_load_errors(tmp_path: Path, chatml: Tokenizer, name: str) -> None:
    folder = _write_folder(tmp_path, chatml)
    (folder / name).write_text("{")
    with pytest.raises(ModelLoadError, match="download it again"):
        load_tokenizer(folder)

"""The Tokenizer over small vocabularies: bytes of tokens, special tokens, folders of files, errors."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequestError, ModelLoadError
from core.text.tokenizer import Tokenizer, count_token_ids, load_tokenizer

MakeTokenizer = Callable[..., Tokenizer]


def test_the_text_side_starts_without_torch_and_transformers() -> None:
    code = (
        "import sys, core.text.tokenizer, core.text.tokenizer_files, core.text.chat_template, core.text.output_decoder;"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or None)"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_added_runs_of_spaces_are_spaces_and_special_tokens_keep_their_spelling(byte_fallback: MakeTokenizer) -> None:
    tokenizer = byte_fallback(special=["<▁end▁>"], markup=["▁▁"])
    assert tokenizer.token_bytes(257) == "<▁end▁>".encode()
    assert tokenizer.token_bytes(258) == b"  "


def _wire(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return bytes([number << 3 | 2, len(value)]) + value
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3, value])


def _sentencepiece_model(pieces: list[tuple[str, float, int]], kind: int = 2) -> bytes:
    fields = [_wire(1, _wire(1, text.encode()) + _wire(2, score) + _wire(3, type_)) for text, score, type_ in pieces]
    return b"".join(fields) + _wire(2, _wire(3, kind)) + _wire(3, _wire(4, 0))


def test_a_sentencepiece_model_alone_is_read(tmp_path: Path) -> None:
    control = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    raw = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    normal = [("ab", -1.0, 1), ("▁ab", -2.0, 1), ("bc", -0.5, 1), ("▁", -3.0, 1), ("a", -4.0, 1), ("b", -5.0, 1)]
    (tmp_path / "tokenizer.model").write_bytes(_sentencepiece_model([*control, *raw, *normal, ("c", -6.0, 1)]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    tokenizer = load_tokenizer(tmp_path)
    pieces = [tokenizer.token_piece(i) for i in tokenizer.encode("ab abc é</s>")]
    assert pieces == ["<s>", "▁ab", "▁", "a", "bc", "▁", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("ab abc é")) == "ab abc é"


def test_a_sentencepiece_model_equals_its_own_library(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("the quick dog", "fox é  jumps", " over<s>the", "", "😊 lazy\n\ndog"):
        assert tokenizer.encode_plain(text) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode_plain(text)) == text


def test_a_damaged_sentencepiece_model_is_a_load_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xff\x01abc")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)


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


@pytest.mark.parametrize(
    "tokenizer_config",
    [
        {"eos_token": {"content": "<|im_end|>"}},
        {"added_tokens_decoder": {"264": {"content": "<new>", "special": True}}},
        {"pad_token": "<a pad of its own>"},
        {"additional_special_tokens": ["<one>", "<two>"]},
    ],
)
def test_ids_are_counted_as_the_built_tokenizer_has_them(
    tmp_path: Path, chatml: Tokenizer, tokenizer_config: dict[str, object]
) -> None:
    folder = _write_folder(tmp_path, chatml, tokenizer_config=tokenizer_config)
    assert count_token_ids(folder) == load_tokenizer(folder).vocab_size


def test_an_empty_place_in_the_vocabulary_counts_as_an_id(tmp_path: Path, chatml: Tokenizer) -> None:
    folder = _write_folder(tmp_path, chatml)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw["model"]["vocab"]["far"] = 5000
    file.write_text(json.dumps(raw), encoding="utf-8")
    assert count_token_ids(folder) == load_tokenizer(folder).vocab_size == 5001


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
    with pytest.raises(ModelLoadError, match="download it again"):
        count_token_ids(folder)


def test_a_long_text_has_the_ids_of_its_parts_and_leaves_the_interpreter_to_other_threads(
    byte_level: MakeTokenizer,
) -> None:
    tokenizer = byte_level([b"ab"], special=["<|x|>"])
    text = "ab <|x|>" * 150_000
    gaps, done = [], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            gaps.append((now := time.perf_counter()) - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    ids = tokenizer.encode(text, add_special_tokens=False)
    took = time.perf_counter() - begin
    done.set()
    watcher.join()
    assert ids == tokenizer.encode("ab <|x|>", add_special_tokens=False) * 150_000
    assert max(gaps) < 0.7 * took


def test_marked_text_is_the_same_long_and_short(byte_level: MakeTokenizer) -> None:
    tokenizer = byte_level([b"ab"], special=["<|x|>"])
    spans = [("ab <|x|>", False), ("<|x|>", True)]
    assert tokenizer.encode_marked(spans * 1000) == tokenizer.encode_marked(spans) * 1000

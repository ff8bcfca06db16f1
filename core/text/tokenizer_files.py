"""Reads tokenizers from where models keep them: a folder of JSON files, a SentencePiece model, a GGUF file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from core.errors import ModelLoadError, ModelNotFoundError
from core.text.gguf_metadata import read_gguf_array_length, read_gguf_metadata
from core.text.gguf_tokenizer import END_OF_TURN_TEXTS, build_gguf_tokenizer, gguf_adds_bos
from core.text.sentencepiece_model import read_sentencepiece_model
from core.text.tokenizer import TokenizerInfo

__all__ = ["read_any", "read_folder", "read_gguf", "read_vocab_size"]

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_GGUF_END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")

Source = tuple[tokenizers.Tokenizer, TokenizerInfo]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerJson(msgspec.Struct):
    """The part of tokenizer.json that numbers tokens; the rest, merges above all, is passed over unread."""

    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def read_any(path: Path) -> Source:
    """Backend and info of the tokenizer at `path`, a .gguf file or a folder."""
    place = _place(path)
    return read_gguf(place) if place.is_file() else read_folder(place)


def read_vocab_size(path: Path) -> int | None:
    """One above the highest token id of the tokenizer at `path`; None where only building it tells."""
    place = _place(path)
    if place.is_file():
        return read_gguf_array_length(place, "tokenizer.ggml.tokens")
    return _count_tokenizer_json(place)


def _place(path: Path) -> Path:
    """The .gguf file or the folder that holds the tokenizer of the model at `path`."""
    if path.is_file():
        return path if path.suffix == ".gguf" else path.parent
    if (path / "tokenizer.json").is_file() or (path / "tokenizer.model").is_file() or not path.is_dir():
        return path
    return next(iter(sorted(path.glob("*.gguf"))), path)


def _count_tokenizer_json(folder: Path) -> int | None:
    """As `read_vocab_size`; None where the configuration may add tokens, or the vocabulary is of an unusual form."""
    try:
        found = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerJson)
    except (OSError, msgspec.MsgspecError):
        return None
    vocab, added = found.model.vocab, found.added_tokens
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    named = [_token_text(config[name]) for name in _NAMES if config.get(name)]
    named += [_token_text(value) for value in config.get("additional_special_tokens") or ()]
    named += [value["content"] for value in config.get("added_tokens_decoder", {}).values()]
    if not {token.content for token in added}.union(vocab).issuperset(named):
        return None
    return 1 + max([*vocab.values(), *(token.id for token in added)], default=-1)


def read_folder(path: Path) -> Source:
    """Backend and info of the tokenizer in a model folder."""
    if not path.is_dir():
        raise ModelNotFoundError(f"there is no folder {str(path)!r}; give the model's folder or its .gguf file")
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    if (path / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(path / "tokenizer.json")
    elif (path / "tokenizer.model").is_file():
        backend = _convert_sentencepiece(path)
    else:
        raise ModelNotFoundError(
            f"the folder {str(path)!r} holds neither tokenizer.json nor tokenizer.model; pass --tokenizer"
        )
    _add_configured_tokens(backend, config)
    names = {name: _token_text(config[name]) for name in _NAMES if config.get(name)}
    info = TokenizerInfo(
        special_tokens=names,
        eos_token_ids=_folder_eos_ids(path, backend, names.get("eos_token")),
        add_bos=_flag(backend, config, "add_bos_token"),
        add_eos=_flag(backend, config, "add_eos_token"),
        chat_template=_folder_template(path, config),
        source=str(path),
    )
    return backend, info


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{str(path)!r} is not JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{str(path)!r} holds a {type(value).__name__}, not an object; download it again")
    return value


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"{str(path)!r} is not a tokenizer: {error}; download it again") from error


def _convert_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    try:
        metadata = read_sentencepiece_model((path / "tokenizer.model").read_bytes())
        if metadata is not None:
            return build_gguf_tokenizer(metadata, set())
    except (ValueError, IndexError, struct.error, AttributeError) as error:
        raise ModelLoadError(
            f"tokenizer.model in {str(path)!r} is not a SentencePiece model ({error}); download it again"
        ) from error
    return _convert_through_transformers(path)


def _convert_through_transformers(path: Path) -> tokenizers.Tokenizer:
    # Slow to import; only for the kinds of SentencePiece model that are not read here.
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        backend: tokenizers.Tokenizer = loaded.backend_tokenizer
    except Exception as error:  # a converter may raise anything
        raise ModelLoadError(
            f"tokenizer.model in {str(path)!r} cannot be converted: {error}; add the model's tokenizer.json"
        ) from error
    return backend


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Adds tokens that tokenizer_config.json knows and tokenizer.json does not, in the order of their ids."""
    known = backend.get_added_tokens_decoder()
    listed = sorted((int(key), value) for key, value in config.get("added_tokens_decoder", {}).items())
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    missing = [
        tokenizers.AddedToken(value["content"], **{name: bool(value.get(name, False)) for name in options})
        for token_id, value in listed
        if token_id not in known
    ]
    if missing:
        backend.add_tokens(missing)
    texts = [_token_text(config[name]) for name in _NAMES if config.get(name)]
    texts += [_token_text(value) for value in config.get("additional_special_tokens") or ()]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in texts:
        if text not in special:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _flag(backend: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> bool | None:
    """An explicit add_bos_token or add_eos_token decides for both; without any the post-processor does."""
    explicit = any(isinstance(config.get(flag), bool) for flag in ("add_bos_token", "add_eos_token"))
    if explicit or backend.post_processor is None:
        return bool(config.get(name, False))
    return None


def _folder_eos_ids(path: Path, backend: tokenizers.Tokenizer, eos_text: str | None) -> tuple[int, ...]:
    found: list[Any] = [backend.token_to_id(eos_text)] if eos_text is not None else []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return _unique_ids(found)


def _unique_ids(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value for value in values if isinstance(value, int) and not isinstance(value, bool)))


def _folder_template(path: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    value = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if (path / "chat_template.jinja").is_file():
        value = (path / "chat_template.jinja").read_text(encoding="utf-8")
    named = {item["name"]: item["template"] for item in value} if isinstance(value, list) else {}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = file.read_text(encoding="utf-8")
    if isinstance(value, str):
        return {"default": value, **named} if named else value
    return named or None


def read_gguf(path: Path) -> Source:
    """Backend and info of the tokenizer in a GGUF file."""
    metadata = read_gguf_metadata(path, "tokenizer.")
    ids = {name: metadata.get(f"tokenizer.ggml.{field}") for name, field in _GGUF_NAMES.items()}
    ends = [metadata.get(f"tokenizer.ggml.{field}") for field in _GGUF_END_FIELDS]
    special = _unique_ids([*ids.values(), *ends])
    backend = build_gguf_tokenizer(metadata, set(special))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    turn_ends = [backend.token_to_id(text) for text in sorted(END_OF_TURN_TEXTS)]
    controls = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    info = TokenizerInfo(
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)},
        eos_token_ids=_unique_ids([*ends, *(i for i in turn_ends if i in controls)]),
        add_bos=gguf_adds_bos(metadata),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        chat_template=_gguf_template(metadata),
        vocab_size=len(tokens),
        source=str(path),
    )
    return backend, info


def _gguf_template(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    prefix = "tokenizer.chat_template"
    main = metadata.get(prefix)
    named = {key[len(prefix) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{prefix}.")}
    if not named:
        return main
    return {"default": main, **named} if main is not None else named

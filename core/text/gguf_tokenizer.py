"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from core.errors import ModelLoadError
from core.text.pretokenizers import pre_tokenizer_kind

__all__ = ["END_OF_TURN_TEXTS", "build_gguf_tokenizer", "gguf_adds_bos"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE_MARK = "▁"

END_OF_TURN_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<|eot|>",
        "<EOT>",
        "<turn|>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Tokens that end an assistant turn; GGUF files name one EOS id only."""


def _field(metadata: dict[str, Any], name: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{name}"]
    except KeyError:
        raise ModelLoadError(
            f"the GGUF file has no tokenizer.ggml.{name}; convert the model again, or pass --tokenizer"
        ) from None


def _build_bpe(tokens: Sequence[str], metadata: dict[str, Any]) -> Tokenizer:
    kind = pre_tokenizer_kind(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    merges = [tuple(merge.split(" ", 1)) for merge in _field(metadata, "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=kind.ignore_merges)
    tokenizer = Tokenizer(model)
    if (normalizer := kind.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = kind.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score of the joined piece first (SentencePiece's order)."""
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (_NORMAL, _USER_DEFINED)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        if types[index] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left = ids.get(token[:cut])
            if left is not None and (right := ids.get(token[cut:])) is not None:
                found.append((-scores[index], left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left_text, right_text) for *_, left_text, right_text in found]


def _build_sentencepiece(tokens: Sequence[str], metadata: dict[str, Any]) -> Tokenizer:
    scores, types = _field(metadata, "scores"), _field(metadata, "token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    byte_fallback = _BYTE in types
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(tokens, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE_MARK)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])
    strip: list[decoders.Decoder] = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _added_tokens(tokens: Sequence[str], types: Sequence[int], special_ids: set[int]) -> list[AddedToken]:
    added = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        special = kind == _CONTROL or index in special_ids or (kind != _NORMAL and token in END_OF_TURN_TEXTS)
        if special or kind in (_USER_DEFINED, _UNKNOWN):
            added.append(AddedToken(token, special=special or kind == _UNKNOWN, normalized=False))
    return added


def build_gguf_tokenizer(metadata: dict[str, Any], special_ids: set[int]) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes, added tokens included, without a post-processor.

    Args:
        metadata: As `read_gguf_metadata(path, "tokenizer.")` gives it.
        special_ids: Ids that are control tokens whatever their type says (BOS, EOS, ...).

    Raises:
        ModelLoadError: a field is missing or the kind is not known.
    """
    model, tokens = _field(metadata, "model"), _field(metadata, "tokens")
    builders = {"gpt2": _build_bpe, "llama": _build_sentencepiece}
    if model not in builders:
        raise ModelLoadError(
            f"the tokenizer model {model!r} of this GGUF file is not known (known: {', '.join(builders)}); "
            "pass the folder of the model's tokenizer.json as --tokenizer"
        )
    tokenizer = builders[model](tokens, metadata)
    tokenizer.add_tokens(_added_tokens(tokens, _field(metadata, "token_type"), special_ids))
    return tokenizer


def gguf_adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether raw prompts begin with BOS: as the file says, else by the kind of tokenizer."""
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return pre_tokenizer_kind(metadata.get("tokenizer.ggml.pre", "gpt-2")).add_bos

"""How byte-level BPE vocabularies cut text before merging, by the kind that a GGUF file names.

The patterns are facts of the released tokenizers (`pre_tokenizer` in their tokenizer.json).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from core.errors import ModelLoadError

__all__ = ["PreTokenizerKind", "pre_tokenizer_kind"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = rf"{_CASED}|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASH_TAIL}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"


@dataclass(frozen=True)
class PreTokenizerKind:
    """What goes with a pre-tokenizer name.

    Args:
        patterns: Split patterns, applied in turn; every match is a piece of its own.
        ignore_merges: Whether a piece that is a token is taken whole.
        add_bos: Whether prompts begin with BOS where the file does not say.
        nfc: Whether text is composed (Unicode NFC) first.
        words: Whether the byte-level step cuts words by the pattern of GPT-2.
    """

    patterns: tuple[str, ...] = ()
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    words: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer, or None where text is taken as it is."""
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """A fresh pre-tokenizer that ends with the byte-level step."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.words))
        return pre_tokenizers.Sequence(steps)


_GPT2 = PreTokenizerKind(words=True)
_DIGITS = PreTokenizerKind((r"\p{N}",), words=True)
_LLAMA = PreTokenizerKind((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizerKind((_QWEN2,), nfc=True)

_KINDS: dict[str, PreTokenizerKind] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "gigachat"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN),
    "qwen35": PreTokenizerKind((_QWEN35,), nfc=True),
    "dbrx": PreTokenizerKind((_LLAMA3,)),
    "smaug-bpe": PreTokenizerKind((_LLAMA3,)),
    "chatglm-bpe": PreTokenizerKind((_LLAMA3,)),
    "gpt-4o": PreTokenizerKind((_GPT4O,)),
    "llama4": PreTokenizerKind((_GPT4O,), add_bos=True),
    "tekken": PreTokenizerKind((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-v3": PreTokenizerKind((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
}


def pre_tokenizer_kind(name: str) -> PreTokenizerKind:
    """The kind called `name` in `tokenizer.ggml.pre`.

    Raises:
        ModelLoadError: the name is not known; guessing would give other token ids than the model was trained on.
    """
    try:
        return _KINDS[name]
    except KeyError:
        raise ModelLoadError(
            f"the pre-tokenizer kind {name!r} of this GGUF file is not known (known: {', '.join(sorted(_KINDS))}); "
            "pass the folder of the model's tokenizer.json as --tokenizer"
        ) from None

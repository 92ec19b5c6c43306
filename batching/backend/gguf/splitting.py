"""How byte-level BPE splits text into words before it merges, by the names that GGUF files have.

A file only names its rule.  The names are llama.cpp's, the patterns those of the original
tokenizers.
"""

from dataclasses import dataclass
from typing import Final

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN3_5: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)


def _cased(digits: str, *, contractions: str = "", but: str = "") -> str:
    """Return a pattern of words that begin where small letters end and great ones begin."""
    great, small = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]",
    )
    before, end = r"[^\r\n\p{L}\p{N}]?", "" if but else "/"
    return (
        rf"{before}{great}*{small}+{contractions}|{before}{great}+{small}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{end}]*|{_SPACES}"
    )


_TEKKEN: Final = _cased(r"\p{N}")
_GPT4O: Final = _cased(r"\p{N}{1,3}", contractions=f"{_CONTRACTIONS}?")
_KIMI: Final = r"\p{Han}+|" + _cased(
    r"\p{N}{1,3}", contractions=f"{_CONTRACTIONS}?", but=r"&&[^\p{Han}]"
)
_DIGIT: Final = r"\p{N}"
_ASCII_PUNCTUATION: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u30ff]+",
    (
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
    ),
)
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    _DIGIT,
)
_DEEPSEEK_CODER: Final = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[一-龥ࠀ-一가-\ud7ff]+",
    _DIGIT,
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """Patterns, each of which splits what the ones before it left.

    keeps_words: a word that is a token as it stands is not merged.
    begins_with_bos: prompts do, unless the file says otherwise.
    composes: characters are composed first (NFC).
    """

    patterns: tuple[str, ...]
    keeps_words: bool = False
    begins_with_bos: bool = False
    composes: bool = False


_KINDS: Final = {
    Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): "default",
    Splitting((_GPT2,)): "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat",
    Splitting((_DIGIT, _GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")): "falcon",
    Splitting((_LLAMA3,), True, True): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    ),
    Splitting((_LLAMA3,)): "smaug-bpe dbrx chatglm-bpe",
    Splitting((_LLAMA3,), True): "glm4 glm5",
    Splitting((_QWEN2,), composes=True): "qwen2 deepseek-r1-qwen megrez",
    Splitting((_QWEN2,)): "stablelm2 hunyuan solar-open kormo grok-2",
    Splitting((_QWEN3_5,), composes=True): "qwen35",
    Splitting((_TEKKEN,), True, True): "tekken",
    Splitting((_GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2",
    Splitting((_KIMI,)): "kimi-k2",
    Splitting(_DEEPSEEK_V3): "deepseek-v3 hunyuan-dense joyai-llm",
    Splitting(_DEEPSEEK_LLM): "deepseek-llm",
    Splitting(_DEEPSEEK_CODER): "deepseek-coder",
}
SPLITTINGS: Final = {name: kind for kind, names in _KINDS.items() for name in names.split()}

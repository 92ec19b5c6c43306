"""The tokenizer that a GGUF file describes in its metadata.

Two kinds occur in the supported families: byte-level BPE (`gpt2`), whose merges are listed and
whose splitting rule is only named (`tokenizer.ggml.pre`), and SentencePiece BPE (`llama`), whose
merges follow from the scores.  A name that is not known here is refused: another rule
would give other tokens than the model was trained on, without any sign of it.
"""

from enum import IntEnum
from importlib import import_module
from typing import Any, Final

from mlx_lm.tokenizer_utils import (
    NaiveStreamingDetokenizer,
    TokenizerWrapper,
    _infer_tool_parser,
)
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from batching.backend.gguf.header import GgufHeader

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT: Final = r"\p{N}"

# Each pattern splits what the ones before it left; the names are llama.cpp's.
_SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (_DIGIT, _GPT2),
    "starcoder": (_DIGIT, _GPT2),
    "refact": (_DIGIT, _GPT2),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama-bpe": (_LLAMA3,),
    "falcon3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "megrez": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
# Every place where a token could be cut is looked at.
_MAX_TOKEN_LENGTH: Final = 1024
# A word that is a token as it stands is not merged; and the prompt begins with bos by default.
_WHOLE_WORDS_AND_BOS: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
_COMPOSED: Final = ("qwen2", "deepseek-r1-qwen", "megrez")

# Texts that end a turn in every vocabulary that has them; the file names at most two of them.
_END_OF_TURN: Final = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
    }
)


class _TokenType(IntEnum):
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(header: GgufHeader) -> TokenizerWrapper:
    """Build the tokenizer with its chat template and every token that ends an answer."""
    tokens = header.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise header.refuse("it has no tokens")
    if (longest := max(map(len, tokens))) > _MAX_TOKEN_LENGTH:
        raise header.refuse(f"a token of {longest} characters")
    bos, eos = (_special(header, tokens, name) for name in ("bos", "eos"))
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_build_backend(header, tokens, bos),
        bos_token=bos,
        eos_token=eos,
        unk_token=_special(header, tokens, "unknown"),
        pad_token=_special(header, tokens, "padding"),
        chat_template=header.text("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
    return TokenizerWrapper(
        tokenizer,
        NaiveStreamingDetokenizer,
        eos_token_ids=_eos_token_ids(header, tokens),
        **_tool_calls(tokenizer),
    )


def _tool_calls(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return how the model writes tool calls, as mlx-lm knows it by the chat template."""
    name = _infer_tool_parser(tokenizer)
    if name is None:
        return {}
    module = import_module(f"mlx_lm.tool_parsers.{name}")
    return {
        "tool_call_start": module.tool_call_start,
        "tool_call_end": module.tool_call_end,
        "tool_parser": module.parse_tool_call,
    }


def _build_backend(header: GgufHeader, tokens: list[str], bos: str | None) -> Tokenizer:
    match header.text("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer, adds_bos = _byte_level(header, tokens)
        case "llama":
            tokenizer, adds_bos = _sentencepiece(header, tokens), True
        case kind:
            raise header.refuse(f"tokenizer {kind} (supported: gpt2 and llama)")
    _add_special_tokens(header, tokenizer, tokens)
    if bos is not None and header.metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B:1"],
            special_tokens=[(bos, tokens.index(bos))],
        )
    return tokenizer


def _byte_level(header: GgufHeader, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether its prompts begin with bos unless the file says so."""
    name = header.text("tokenizer.ggml.pre")
    if name not in _SPLITS:
        raise header.refuse(f"pre-tokenizer {name} (supported: {', '.join(_SPLITS)})")
    merges = [_pair(merge) for merge in header.strings("tokenizer.ggml.merges")]
    is_llama3 = name in _WHOLE_WORDS_AND_BOS
    tokenizer = Tokenizer(
        models.BPE(_numbered(tokens), merges, ignore_merges=is_llama3, fuse_unk=False)
    )
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, is_llama3


def _sentencepiece(header: GgufHeader, tokens: list[str]) -> Tokenizer:
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise header.refuse("its SentencePiece tokens have no scores")
    vocabulary = _numbered(tokens)
    unknown = _special(header, tokens, "unknown")
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(tokens, scores, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    add_prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend("▁")] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(
    tokens: list[str], scores: list[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """List every way to join two tokens into a third, best score of the third first."""
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(tokens)), key=lambda index: -scores[index]):
        token = tokens[index]
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += [(a, b) for a, b in splits if a in vocabulary and b in vocabulary]
    return merges


def _add_special_tokens(header: GgufHeader, tokenizer: Tokenizer, tokens: list[str]) -> None:
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(tokens, header.numbers("tokenizer.ggml.token_type"), strict=False):
        if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN) or token in _END_OF_TURN:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _eos_token_ids(header: GgufHeader, tokens: list[str]) -> list[int]:
    named = {
        header.integer(f"tokenizer.ggml.{name}_token_id", -1) for name in ("eos", "eot", "eom")
    }
    ends = {index for index, token in enumerate(tokens) if token in _END_OF_TURN}
    return sorted((named | ends) & set(range(len(tokens))))


def _special(header: GgufHeader, tokens: list[str], name: str) -> str | None:
    index = header.integer(f"tokenizer.ggml.{name}_token_id", -1)
    return tokens[index] if 0 <= index < len(tokens) else None


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}

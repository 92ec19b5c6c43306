"""The tokenizer that a GGUF file describes in its metadata.

Two kinds occur in the supported architectures: byte-level BPE (`gpt2`), whose merges are listed
and whose splitting rule is only named (`tokenizer.ggml.pre`), and SentencePiece BPE, whose merges
follow from the scores (`llama`) or are listed (`gemma4`).  A name that is not known here is
refused: another rule would give other tokens than the model was trained on, without any sign of
it.
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
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from batching.backend.gguf.splitting import SPLITTINGS
from batching.model_files.gguf_header import GgufHeader

_MAX_TOKEN_LENGTH: Final = 1024
# For each token where merges follow from scores: models have two merges, and less than ten characters.
_MAX_MERGES: Final = 4
_MAX_SQUARE: Final = 256
# Merges and squares that any vocabulary may have, however small it is.
_MIN_MERGES: Final = 1 << 16
_MIN_SQUARES: Final = 1 << 20
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
        "<turn|>",
        "<EOT>",
        "<|observation|>",
        "<|return|>",
        "<|call|>",
    }
)
# In gpt-oss a turn goes on after the end of a message.
_END_OF_MESSAGE: Final = "<|end|>"
_ENDS_AFTER_MESSAGES: Final = "<|return|>"
_KEEP_SPACE_OF_PHI3: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})


Merges = list[tuple[str, str]]


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
        tokenizer_object=_build_backend(header, tokens, bos, eos),
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


def with_chat_template(tokenizer: TokenizerWrapper, template: str) -> TokenizerWrapper:
    """Return a tokenizer with another template, and the tool calls of that."""
    inner = tokenizer._tokenizer
    inner.chat_template = template
    return TokenizerWrapper(
        inner,
        NaiveStreamingDetokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        **_tool_calls(inner),
    )


def _tool_calls(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
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


def _build_backend(
    header: GgufHeader, tokens: list[str], bos: str | None, eos: str | None
) -> Tokenizer:
    match header.text("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer, adds_bos = _byte_level(header, tokens)
        case "llama":
            merges = _merges_by_score(header, tokens)
            tokenizer, adds_bos = _sentencepiece(header, tokens, merges, adds_prefix=True), True
        case "gemma4":
            merges = _listed_merges(header)
            tokenizer, adds_bos = _sentencepiece(header, tokens, merges, adds_prefix=False), True
        case kind:
            raise header.refuse(
                f"tokenizer {kind} is not known: take the model as MLX or Hugging Face directory "
                "(known: gpt2, llama and gemma4)"
            )
    _add_special_tokens(header, tokenizer, tokens)
    begins = header.metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    before = [bos] if bos is not None and begins else []
    after = [eos] if eos is not None and _embeds_with_eos(header) else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(token, tokens.index(token)) for token in {*before, *after}],
        )
    return tokenizer


def _embeds_with_eos(header: GgufHeader) -> bool:
    """True if eos ends the texts of an embedding model; a prompt of any other must go on."""
    pooling = f"{header.text('general.architecture')}.pooling_type"
    return bool(
        header.metadata.get(pooling) and header.metadata.get("tokenizer.ggml.add_eos_token")
    )


def _byte_level(header: GgufHeader, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether its prompts begin with bos unless the file says so."""
    name = header.text("tokenizer.ggml.pre", "none") or "none"
    if (splitting := SPLITTINGS.get(name)) is None:
        raise header.refuse(
            f"pre-tokenizer {name} is not known: take the model as MLX or Hugging Face directory "
            f"(known: {', '.join(SPLITTINGS)})"
        )
    tokenizer = Tokenizer(
        models.BPE(_numbered(tokens), _listed_merges(header), ignore_merges=splitting.keeps_words)
    )
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.begins_with_bos


def _sentencepiece(
    header: GgufHeader, tokens: list[str], merges: Merges, *, adds_prefix: bool
) -> Tokenizer:
    vocabulary = _numbered(tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=_special(header, tokens, "unknown"),
            fuse_unk=True,
            byte_fallback=all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)),
        )
    )
    adds_prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", adds_prefix))
    prefix = [normalizers.Prepend("▁")] if adds_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(header: GgufHeader, tokens: list[str]) -> Merges:
    """List every way to join two tokens into a third, best score of the third first.

    A token of n characters is cut at n - 1 places into n characters, and each pair found takes memory: a few
    megabytes of tokens could have billions of characters and millions of pairs.

    Raises:
        ModelLoadError: they have more than those of models.
    """
    scores = header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise header.refuse("its SentencePiece tokens have no scores")
    squares, most = sum(len(token) ** 2 for token in tokens), _MAX_SQUARE * len(tokens)
    if squares > max(most, _MIN_SQUARES):
        raise header.refuse(
            f"its {len(tokens)} tokens are too long to find their merges: their lengths squared are {squares}"
        )
    max_merges = max(_MAX_MERGES * len(tokens), _MIN_MERGES)
    # Pairs are made of these strings and not of copies.
    known = {token: token for token in tokens}
    merges: Merges = []
    for index in sorted(range(len(tokens)), key=lambda index: -scores[index]):
        token = tokens[index]
        cuts = ((known.get(token[:at]), known.get(token[at:])) for at in range(1, len(token)))
        merges += [(left, right) for left, right in cuts if left is not None and right is not None]
        if len(merges) > max_merges:
            raise header.refuse(f"its {len(tokens)} tokens have more than {max_merges} merges")
    return merges


def _listed_merges(header: GgufHeader) -> Merges:
    return [_pair(merge) for merge in header.strings("tokenizer.ggml.merges")]


def _add_special_tokens(header: GgufHeader, tokenizer: Tokenizer, tokens: list[str]) -> None:
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    # Phi 3's tokens of SentencePiece take in the space behind them, which no key of the file says.
    strips = header.text("general.architecture") == "phi3" and (
        header.text("tokenizer.ggml.model") == "llama"
    )
    for token, kind in zip(tokens, header.numbers("tokenizer.ggml.token_type"), strict=False):
        rstrip = strips and token not in _KEEP_SPACE_OF_PHI3
        if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN) or token in _END_OF_TURN:
            special.append(AddedToken(token, special=True, normalized=False, rstrip=rstrip))
        elif kind == _TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False, rstrip=rstrip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _eos_token_ids(header: GgufHeader, tokens: list[str]) -> list[int]:
    named = {
        header.integer(f"tokenizer.ggml.{name}_token_id", -1) for name in ("eos", "eot", "eom")
    }
    texts = _END_OF_TURN - ({_END_OF_MESSAGE} if _ENDS_AFTER_MESSAGES in tokens else set())
    ends = {index for index, token in enumerate(tokens) if token in texts}
    return sorted((named | ends) & set(range(len(tokens))))


def _special(header: GgufHeader, tokens: list[str], name: str) -> str | None:
    index = header.integer(f"tokenizer.ggml.{name}_token_id", -1)
    return tokens[index] if 0 <= index < len(tokens) else None


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}

"""A text's length tells how many tokens it has at least, whatever the text."""

import sys
import unicodedata
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given, strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from app.api.openai.chat.request import ChatCompletionRequest
from app.parsing.tool_format import tool_format
from app.prompts.length_bound import MAX_SHRINKING, token_bytes
from app.prompts.render import PromptTooLong, Truncation, chat_prompt, completion_prompt
from batching import ModelInfo
from tests.support.speaker import ByteTokenizer

CORPUS: Final = [
    "the cat, the hat   and the that\n\n    in the flat 1234",
    "élève œuvre naïve 猫",
] * 3
BYTES: Final = pre_tokenizers.ByteLevel.alphabet()
BLANK: Final = "\u2581"


class Wrapped(ByteTokenizer):
    """A tokenizer as mlx-lm wraps it."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend
        self.num_characters: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_characters.append(len(text))
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def model_of(backend: Tokenizer, max_model_len: int = 64) -> ModelInfo:
    return ModelInfo("m", Wrapped(backend), frozenset({0}), 1000, max_model_len)


def byte_level(*, initial_alphabet: list[str] = BYTES, **model: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        initial_alphabet=initial_alphabet,
        special_tokens=["<|end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece(*, byte_fallback: bool = True, num_bytes: int = 256) -> Tokenizer:
    spelt = [f"<0x{byte:02X}>" for byte in range(num_bytes)]
    pieces = ["<unk>", *spelt, BLANK, *"theca", 2 * BLANK, "th", "the", f"{BLANK}the"]
    merges = [(BLANK, BLANK), ("t", "h"), ("th", "e"), (BLANK, "the")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
    )
    return tokenizer


def with_parts(**parts: Any) -> Tokenizer:
    tokenizer = byte_level()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_added(token: AddedToken) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([token])
    return tokenizer


KNOWN: Final[dict[str, Callable[[], Tokenizer]]] = {
    "byte level": byte_level,
    "bytes unknown": lambda: byte_level(initial_alphabet=[]),
    "composed": lambda: with_parts(normalizer=normalizers.NFC()),
    "blanks taken": lambda: with_added(AddedToken("<mask>", lstrip=True, rstrip=True)),
    "metaspace": lambda: with_parts(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(use_regex=False)]
        )
    ),
    "sentencepiece": sentencepiece,
}

UNKNOWN: Final[dict[str, Callable[[], Tokenizer]]] = {
    "words": lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    "dropout": lambda: byte_level(dropout=0.5),
    "prefix": lambda: Tokenizer(models.BPE({"a": 0}, [], continuing_subword_prefix="##")),
    "suffix": lambda: Tokenizer(models.BPE({"a": 0}, [], end_of_word_suffix="</w>")),
    "lower case": lambda: with_parts(normalizer=normalizers.Lowercase()),
    "replaced": lambda: with_parts(normalizer=normalizers.Replace(" ", "")),
    "blanks dropped": lambda: with_parts(pre_tokenizer=pre_tokenizers.Whitespace()),
    "split away": lambda: with_parts(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    "other blank": lambda: with_parts(pre_tokenizer=pre_tokenizers.Metaspace("_")),
    "without bytes": lambda: sentencepiece(byte_fallback=False),
    "too few bytes": lambda: sentencepiece(num_bytes=255),
}

PIECES: Final = st.sampled_from(
    ["the", " ", "  ", "\n", "cat", "<mask>", "<|end|>", "<0x20>", BLANK, "e\u0301", "\u212b", "猫"]
)
TEXTS: Final = st.lists(PIECES | st.text(max_size=5), max_size=20).map("".join)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_text_has_as_many_tokens_at_least(kind: str) -> None:
    model = model_of(KNOWN[kind]())

    @given(TEXTS)
    def never_too_many(text: str) -> None:
        known = token_bytes(model)
        assert known is not None
        assert known.fewest_tokens(text) <= len(model.tokenizer.encode(text))

    never_too_many()


@pytest.mark.parametrize("kind", KNOWN)
def test_of_a_long_text_the_number_is_of_use(kind: str) -> None:
    known = token_bytes(model_of(KNOWN[kind]()))
    assert known is not None
    assert known.fewest_tokens("the hat and the cat " * 1000) > 500


@pytest.mark.parametrize("kind", UNKNOWN)
def test_of_other_tokenizers_nothing_is_known(kind: str) -> None:
    assert token_bytes(model_of(UNKNOWN[kind]())) is None


def test_of_a_tokenizer_that_is_not_hugging_faces_nothing_is_known() -> None:
    model = ModelInfo("m", ByteTokenizer(), frozenset({0}), 257, 4)
    assert token_bytes(model) is None
    assert completion_prompt(model, "hello", add_special_tokens=True) == list(b"hello")


def test_composing_leaves_a_part_of_the_bytes() -> None:
    """Each character that composing leaves, against the longest text that it leaves it of."""
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    parts_of = {c: unicodedata.normalize("NFD", c) for c in characters}
    longest: dict[str, int] = {}
    for character, parts in parts_of.items():
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    for character, parts in parts_of.items():
        num_bytes = sum(longest[part] for part in parts)
        assert len(character.encode()) <= num_bytes
        composed = unicodedata.normalize("NFC", character)
        assert num_bytes <= MAX_SHRINKING * len(composed.encode())


# What it is for


def test_what_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    model = model_of(byte_level())
    assert isinstance(model.tokenizer, Wrapped)
    text = "the hat and the cat " * 1000
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": text}]})
    tools = tool_format(model)
    model.tokenizer.num_characters.clear()
    with pytest.raises(PromptTooLong, match="maximum context length is 64 tokens") as refused:
        completion_prompt(model, text, add_special_tokens=True)
    assert refused.value.limit == 64
    assert refused.value.num_prompt_tokens > 500
    with pytest.raises(PromptTooLong):
        chat_prompt(model, body.to_conversation(), tools)
    with pytest.raises(PromptTooLong):
        completion_prompt(model, text, add_special_tokens=True, truncation=Truncation(65, 0))
    assert model.tokenizer.num_characters == []


@pytest.mark.parametrize("num_kept", [1, 30, 64, -1])
def test_of_a_text_that_is_cut_the_end_is_tokenized(num_kept: int) -> None:
    model = model_of(byte_level())
    assert isinstance(model.tokenizer, Wrapped)
    text = "the hat and the cat, " * 10_000
    whole = model.tokenizer.encode(text)
    truncation = Truncation(None if num_kept < 0 else num_kept, 0)
    token_ids = completion_prompt(model, text, add_special_tokens=True, truncation=truncation)
    num_wanted = 64 if num_kept < 0 else num_kept
    assert token_ids[-num_wanted:] == whole[-num_wanted:]
    assert model.tokenizer.num_characters[-1] < len(text) // 10


def test_tokens_are_taken_as_they_are() -> None:
    model = model_of(byte_level())
    assert completion_prompt(model, [1] * 1000, add_special_tokens=True) == [1] * 1000

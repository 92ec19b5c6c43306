"""The pieces of text join to the text of all tokens."""

from collections.abc import Sequence

from hypothesis import example, given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from app.generation.detokenizer import Detokenizer
from tests.support.rows import rows
from tests.support.speaker import ByteTokenizer

TRAINING_TEXT = "the quick brown fox 你好 你们好 Grüße größer 👋👋🏽 naïve café \ufffd\ufffd"
END = "<|end|>"


class HubTokenizer(ByteTokenizer):
    """The part of a Hugging Face tokenizer that decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def token_id(self, token: str) -> int:
        return self._tokenizer.get_vocab()[token]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(token_ids)
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


def byte_level() -> HubTokenizer:
    """Every byte is a token, and so are words, characters and odd halves of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return HubTokenizer(tokenizer)


def sentencepiece() -> HubTokenizer:
    """As in Llama 2: spaces lead their words, and bytes stand for what is no token."""
    words = ["▁the", "▁", "fox", "▁fox", "é"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return HubTokenizer(tokenizer)


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()

token_ids = st.integers(0, BYTE_LEVEL.vocab_size - 1)
# Few tokens, so that bytes meet that begin, continue and break characters.
broken = st.sampled_from([*BYTE_LEVEL.encode("你👋é a\ufffd"), BYTE_LEVEL.vocab_size - 1])


def pieces(tokenizer: HubTokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.add, ids), detokenizer.flush()]


def byte_ids(data: bytes) -> list[int]:
    """Return the single-byte tokens, as a confused model would generate them."""
    # GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return [
        BYTE_LEVEL.token_id(chr(byte if byte in printable else 0x100 + others.index(byte)))
        for byte in data
    ]


@given(st.lists(st.one_of(token_ids, broken), max_size=30))
@example(byte_ids(b"\xff" * 20))
@example(byte_ids(b"\xe4" * 7))
@example(byte_ids(b"\xe4\x98\xf0\xbd\xbd"))
@example([*byte_ids(b"\xff\xff\xff\xff\xff\xe4"), BYTE_LEVEL.vocab_size - 1])
@example([*byte_ids(b"\xe4\xbd"), *[BYTE_LEVEL.vocab_size - 1] * 3, *byte_ids(b"\xa0")])
def test_the_pieces_join_to_the_whole(ids: list[int]) -> None:
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    joined = "".join(pieces(BYTE_LEVEL, ids))
    assert whole.startswith(joined)
    assert set(whole.removeprefix(joined)) <= {"\ufffd"}


@given(st.lists(st.lists(st.one_of(token_ids, broken), max_size=6), max_size=6))
def test_tokens_that_come_together_have_the_text_of_each(groups: list[list[int]]) -> None:
    """Also where a group ends within a character, with a special token, or with broken bytes."""
    detokenizer = Detokenizer(BYTE_LEVEL)
    joined = "".join([*map(detokenizer.add_all, groups), detokenizer.flush()])
    assert joined == "".join(pieces(BYTE_LEVEL, [i for group in groups for i in group]))


@given(st.text(max_size=20).filter(lambda text: not text.endswith("\ufffd")))
def test_a_text_round_trips(text: str) -> None:
    assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text))) == text


@rows("size", [1, 2, 3])
def test_a_character_without_its_last_bytes_is_left_out(size: int) -> None:
    emoji = "👋".encode()[:size]
    assert "".join(pieces(BYTE_LEVEL, byte_ids(b"a\xff" + b"b" + emoji))) == "a\ufffdb"
    tokens = [SENTENCEPIECE.token_id(f"<0x{byte:02X}>") for byte in emoji]
    assert "".join(pieces(SENTENCEPIECE, [SENTENCEPIECE.token_id("fox"), *tokens])) == "fox"


@rows(
    "tokens",
    [
        ["▁the", "▁fox"],
        ["▁the", END, "▁fox"],
        ["▁the", "▁", "▁fox"],
        ["▁", "▁the"],
        ["<0xE4>", "<0xBD>", "<0xA0>", "<0xE5>", "<0xA5>", "<0xBD>", "▁fox"],
        ["▁the", "<0xF0>", "<0x9F>", "<0x91>", "<0x8B>"],
        ["▁the", "<0xE4>", "fox"],
    ],
)
def test_spaces_and_bytes_of_sentencepiece(tokens: list[str]) -> None:
    ids = [SENTENCEPIECE.token_id(token) for token in tokens]
    whole = SENTENCEPIECE.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(SENTENCEPIECE, ids)) == whole


def test_a_character_is_returned_with_its_last_byte() -> None:
    assert pieces(BYTE_LEVEL, byte_ids(b"a\xc3\xa9b")) == ["a", "", "é", "b", ""]


def test_a_special_token_has_no_text() -> None:
    end = BYTE_LEVEL.vocab_size - 1
    assert pieces(BYTE_LEVEL, [*byte_ids(b"a"), end, *byte_ids(b"b")]) == ["a", "", "b", ""]


@rows("data", [b"a", b"\xff", b"\xc3\xa9"])
def test_the_work_for_a_token_does_not_grow(data: bytes) -> None:
    tokenizer = byte_level()
    ids = byte_ids(data) * 500
    pieces(tokenizer, ids)
    assert tokenizer.num_decoded < 20 * len(ids)


@rows("offset", [-1, 1])
@rows("before", [b"", b"a", b"\xc3"])
def test_the_work_does_not_grow_with_tokens_of_no_text(offset: int, before: bytes) -> None:
    tokenizer = byte_level()
    pieces(tokenizer, [*byte_ids(before), *[tokenizer.vocab_size + offset] * 1000])
    assert tokenizer.num_decoded < 20 * 1000

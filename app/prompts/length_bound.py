"""How many tokens a text has at least, found out without tokenizing it.

Each token stands for some bytes.  If no token that has a certain byte is longer than n bytes, that
byte is a share of 1/n of a token at least, and the shares of a text's bytes add up to no more than
its tokens.  This holds where every byte of a text becomes part of some token, which is so for the
two kinds of BPE that most models have; of other tokenizers nothing is known.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from batching import ModelInfo

_NUM_BYTES: Final = 256
# Composed characters (NFC) have a fourth of the bytes of what they are made of, or more.
MAX_SHRINKING: Final = 4

# SentencePiece's spelling of a space, and of a byte that is no character by itself.
_BLANK: Final = "\u2581"
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")

_SPLITTERS: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What is known of the bytes that a vocabulary's tokens stand for.

    shares: of a token, for each byte.
    num_longest: bytes of the longest token.
    is_composed: characters are composed before they become tokens.
    """

    shares: NDArray[np.float64]
    num_longest: int
    is_composed: bool

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        encoded = text.encode()
        if self.is_composed and not text.isascii():
            return len(encoded) // (MAX_SHRINKING * self.num_longest)
        counts = np.bincount(np.frombuffer(encoded, np.uint8), minlength=_NUM_BYTES)
        # Rounding must not make it one more.
        return int(float(counts @ self.shares) * (1 - 1e-9))

    @classmethod
    def of(cls, tokens: Iterable[bytes], *, is_composed: bool, takes_blanks: bool) -> Self:
        """Look at all tokens; with `takes_blanks` there is one that takes the blanks around it."""
        longest = [0] * _NUM_BYTES
        alone: set[int] = set()
        for token in tokens:
            alone.update(token if len(token) == 1 else ())
            for byte in {*token}:
                longest[byte] = max(longest[byte], len(token))
        # A byte without a token of its own may be left out, unless a longer token has it.
        counted = (b for b in alone if not (takes_blanks and _may_be_blank(b)))
        shares = np.zeros(_NUM_BYTES)
        for byte in counted:
            shares[byte] = 1 / longest[byte]
        return cls(shares, max(longest), is_composed)


def _may_be_blank(byte: int) -> bool:
    """True of the bytes of all characters that Unicode takes for blanks."""
    return byte >= 0x80 or chr(byte).isspace()


@lru_cache(maxsize=8)
def token_bytes(model: ModelInfo) -> TokenBytes | None:
    """Return what is known of a model's tokens; reading its vocabulary takes up to half a second."""
    # Hugging Face's fast tokenizers have one, and mlx-lm's wrapper shows it.
    backend: Any = getattr(model.tokenizer, "backend_tokenizer", None)
    if backend is None or not _is_plain_bpe(backend.model):
        return None
    normalizers = list(_steps(backend.normalizer, "normalizers"))
    splitters = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    if not (all(map(_keeps_bytes, normalizers)) and all(map(_only_splits, splitters))):
        return None
    has_bytes = any(step["type"] == "ByteLevel" for step in splitters)
    tokens = _tokens(backend, has_bytes=has_bytes)
    if tokens is None:
        return None
    added = backend.get_added_tokens_decoder().values()
    return TokenBytes.of(
        [*tokens, *(token.content.encode() for token in added)],
        is_composed=any(step["type"] == "NFC" for step in normalizers),
        takes_blanks=any(token.lstrip or token.rstrip for token in added),
    )


def _is_plain_bpe(model: Any) -> bool:
    return type(model).__name__ == "BPE" and not (
        model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix
    )


def _steps(component: Any, parts: str) -> Iterator[dict[str, Any]]:
    """Yield what a normalizer or a splitter does, one thing after the other."""
    steps = [] if component is None else [json.loads(component.__getstate__())]
    while steps:
        step = steps.pop()
        if step["type"] == "Sequence":
            steps += step[parts]
        else:
            yield step


def _keeps_bytes(normalizer: dict[str, Any]) -> bool:
    """True if all bytes are still there afterwards, spaces in SentencePiece's spelling."""
    match normalizer:
        case {"type": "NFC" | "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": content}:
            return bool(content == _BLANK)
        case _:
            return False


def _only_splits(splitter: dict[str, Any]) -> bool:
    """True if nothing of the text is dropped at a split."""
    is_known = splitter["type"] in _SPLITTERS and splitter.get("behavior") != "Removed"
    return is_known and splitter.get("replacement", _BLANK) == _BLANK


def _tokens(backend: Any, *, has_bytes: bool) -> list[bytes] | None:
    """Return what a model's tokens stand for, or None if some texts have no tokens."""
    pieces: Iterable[str] = backend.get_vocab(with_added_tokens=False)
    if has_bytes:
        alphabet = _byte_alphabet()
        return [bytes(alphabet[c] for c in piece if c in alphabet) for piece in pieces]
    spelt = {found[1] for piece in pieces if (found := _BYTE.fullmatch(piece))}
    if not backend.model.byte_fallback or len(spelt) < _NUM_BYTES:
        return None
    # A blank may be a space of the text or the character that it is spelt with.
    texts = [piece.encode() + b" " * (_BLANK in piece) for piece in pieces]
    return [*texts, *map(bytes.fromhex, spelt)]


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that GPT-2, and byte-level BPE since, has for bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, _NUM_BYTES)]
    hidden = [byte for byte in range(_NUM_BYTES) if byte not in shown]
    named = {chr(byte): byte for byte in shown}
    return named | {chr(_NUM_BYTES + i): byte for i, byte in enumerate(hidden)}

"""Tries grammars, as a worker of `batching.sandbox`: it must not import anything of the project.

llguidance counts fuel for most of what it does, but not for all: a few kilobytes of
`patternProperties` take minutes, and a long chain of rules overflows the stack, which would
take the server down.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# Speeds below are of one core; the defaults allow masks that delay every other request.
LIMITS: Final = LLParserLimits(
    max_items_in_row=1000,  # an object of some 250 optional properties
    step_max_items=20_000,
    step_lexer_fuel=100_000,  # some 10 ms a token
    max_lexer_states=50_000,  # some 0.4 kB each, so 20 MB
    initial_lexer_fuel=500_000,  # some 0.2 s
    max_grammar_size=200_000,
    verbose_errors=False,
)

_NUM_BYTES: Final = 256


class SpecialTokens(NamedTuple):
    """The tokens that grammars can name: special ones by text, every one by id."""

    num_tokens: int
    texts: Mapping[int, str]

    def line(self, grammar: str) -> bytes:
        """Return the line that asks for a grammar to be tried with this vocabulary."""
        return json.dumps([self.num_tokens, list(self.texts.items()), grammar]).encode()


class _Bytes:
    """A vocabulary of single bytes with another's special tokens and size."""

    bos_token_id = None

    def __init__(self, tokens: SpecialTokens) -> None:
        self.special_token_ids = list(tokens.texts)
        self.eos_token_id = self.special_token_ids[0]
        self.tokens = [b""] * tokens.num_tokens
        others = (i for i in range(tokens.num_tokens) if i not in tokens.texts)
        self._ids = dict(zip(range(_NUM_BYTES), others, strict=False))
        for byte, token_id in self._ids.items():
            self.tokens[token_id] = bytes([byte])
        for token_id, text in tokens.texts.items():
            self.tokens[token_id] = text.encode()

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


def answer(line: bytes) -> bytes:
    """Compile the grammar of a line; a grammar that is found to be invalid has the same answer."""
    num_tokens, texts, grammar = json.loads(line)
    tokenizer = _tokenizer(num_tokens, tuple(map(tuple, texts)))
    LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    return b""


@lru_cache(maxsize=2)
def _tokenizer(num_tokens: int, texts: tuple[tuple[int, str], ...]) -> LLTokenizer:
    """Return what grammars are tried with: the texts of other tokens do not matter to a compiler."""
    return LLTokenizer(TokenizerWrapper(_Bytes(SpecialTokens(num_tokens, dict(texts)))))

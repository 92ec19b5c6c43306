"""Grammars that a completion must follow, compiled by llguidance for one model's vocabulary.

A request asks for a `GrammarText`, without the model; a `GrammarCompiler` makes a `Grammar` of it, and
each completion has a `GrammarMatcher` over it.
"""

import json
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from batching.constraints import compile_process
from batching.constraints.compile_process import LIMITS, SpecialTokens
from batching.constraints.grammar_text import GrammarText, InvalidGrammar
from batching.constraints.matcher import (
    GrammarMatcher,
    GrammarPanic,
    Vocabulary,
    panics_as_exceptions,
    reason_of,
)
from batching.constraints.token_texts import TokenTexts
from batching.errors import RequestFailed
from batching.model_info.model import Tokenizer
from batching.sandbox.sandbox import Sandbox, SandboxExceeded, SandboxLimits, SandboxLost

# The grammar of all tools of a request fits.
MAX_GRAMMAR_LENGTH: Final = 512 * 1024
# A grammar is checked once, as long as it is among the latest.
_MAX_CACHED_CHECKS: Final = 64

# An overflow of the stack would end the server: a thread of it has eight times as much on Linux, and more on a Mac.
_SANDBOX: Final = Sandbox(
    compile_process.__file__,
    SandboxLimits(cpu_seconds=2, memory_bytes=1 << 30, stack_bytes=1 << 20),
)


class Grammar:
    """A grammar as a `Constraint`: two are equal if they have the same text and begin alike.

    The matchers of a compiled grammar share the states that the lexer has met, and their limit: compile
    one for each request, and let only the choices of that request share it.

    text: the grammar that it was compiled from.
    begun: tokens at the end of the prompt that are the beginning of the grammar's text.
    """

    def __init__(
        self, text: GrammarText, begun: tuple[int, ...] = (), start: GrammarMatcher | None = None
    ) -> None:
        """start: its matcher behind `begun`; None if it is not compiled in this process."""
        self.text = text
        self.begun = begun
        self._start = start

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grammar) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"Grammar({self.text!r}, {self.begun})"

    def __reduce__(self) -> tuple[type["Grammar"], tuple[GrammarText, tuple[int, ...]]]:
        # A matcher has no bytes: who reads the grammar compiles it again.
        return Grammar, self._value

    @property
    def error(self) -> str | None:
        """Why nothing can follow what it begins with; None if something can."""
        return self._compiled.error

    def matcher(self) -> GrammarMatcher:
        return self._compiled.fork()

    def begun_with(self, token_ids: Sequence[int]) -> "Grammar":
        """Return the rest of the grammar behind tokens with which the prompt ends."""
        start = self.matcher()
        for token_id in token_ids:
            start.accept(token_id)
        return Grammar(self.text, (*self.begun, *token_ids), start)

    @property
    def _value(self) -> tuple[GrammarText, tuple[int, ...]]:
        return self.text, self.begun

    @property
    def _compiled(self) -> GrammarMatcher:
        assert self._start is not None, "a grammar that was read from bytes is compiled first"
        return self._start


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, in any thread."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [i for i in sorted(eos_token_ids) if i < vocab_size]
        self._lock = Lock()
        self._loaded: Vocabulary | str | None = None
        self._is_within_limits = lru_cache(_MAX_CACHED_CHECKS)(self._compiles_within_limits)

    def compile(self, grammar: GrammarText, *, param: str = "grammar") -> Grammar:
        """Compile a grammar, which takes milliseconds; the first one a tenth of a second, the worst ones seconds.

        Raises:
            InvalidGrammar: it cannot be enforced; `param` names the field that it came from.
            RequestFailed: whether it can was not found out.
        """
        if len(grammar) > MAX_GRAMMAR_LENGTH:
            message = f"a grammar of {len(grammar)} characters exceeds {MAX_GRAMMAR_LENGTH}"
            raise InvalidGrammar(param, message)
        try:
            vocabulary = self._vocabulary()
        except ValueError as error:
            message = f"this model cannot follow a grammar: {reason_of(str(error))}"
            raise InvalidGrammar(param, message) from error
        try:
            is_within_limits = self._is_within_limits(grammar)
        except SandboxLost:
            message = "the process that compiles the grammar was ended; please try again"
            raise RequestFailed(message) from None
        if not is_within_limits:
            raise InvalidGrammar(param, "the grammar takes too much time or memory to compile")
        try:
            with panics_as_exceptions():
                matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
                warnings = matcher.get_grammar_warnings()
        except Exception as error:
            raise InvalidGrammar(param, "the grammar cannot be compiled") from error
        start = GrammarMatcher(matcher, vocabulary)
        problem = start.error or self._first_error(start)
        # llguidance does not enforce what it only warns of.
        for warning in [problem] if problem else warnings:
            raise InvalidGrammar(param, reason_of(warning))
        return Grammar(grammar, start=start)

    def _first_error(self, start: GrammarMatcher) -> str | None:
        """Return why a completion fails at its first or second token.

        A grammar that is too wide, an object of many optional properties, fails there.
        """
        matcher = start.fork()
        row = self._vocabulary().empty_row()
        matcher.fill_mask(row)
        for token_id in np.setdiff1d(_token_ids(row), self._eos_token_ids)[:1]:
            matcher.accept(int(token_id))
            matcher.fill_mask(row)
        return matcher.error

    def _vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load_or_reason()
            if isinstance(self._loaded, str):
                raise ValueError(self._loaded)
            return self._loaded

    def _load_or_reason(self) -> Vocabulary | str:
        """Return the vocabulary, or why there is none: a tokenizer is not read again for each token."""
        try:
            with panics_as_exceptions():
                return self._load()
        except GrammarPanic:
            return "its tokenizer cannot be read"
        except ValueError as error:
            return str(error)

    def _load(self) -> Vocabulary:
        """Read the tokenizer, which takes up to a second.

        Raises:
            ValueError: grammars are impossible with it.
        """
        # Hugging Face's fast tokenizers have one, and mlx-lm's wrapper exposes it.
        backend: Any = copy(getattr(self._tokenizer, "backend_tokenizer", None))
        if backend is None:
            raise ValueError("its tokenizer does not expose the bytes of its tokens")
        if not self._eos_token_ids:
            raise ValueError("it has no end token")
        # Else their text would be allowed as text, and the completion would end in the middle.
        ends = map(backend.id_to_token, self._eos_token_ids)
        backend.add_special_tokens([end for end in ends if end is not None])
        num_known = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        tokenizer = LLTokenizer(
            _as_written(backend.to_str()),
            n_vocab=max(num_known, self._vocab_size),
            eos_token=self._eos_token_ids,
        )
        return Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; it may be a part of a character only."""
        return self._decoder()(token_id)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The bytes of all tokens; reading them takes up to a second, the first time."""
        return TokenTexts([*map(self._decoder(), range(self._vocab_size))])

    def _decoder(self) -> Callable[[int], bytes]:
        try:
            tokenizer = self._vocabulary().tokenizer
        except ValueError:
            return lambda token_id: self._tokenizer.decode([token_id]).encode()
        return lambda token_id: tokenizer.decode_bytes([token_id])

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return _special_tokens(self._vocabulary().tokenizer)

    def _compiles_within_limits(self, grammar: GrammarText) -> bool:
        try:
            _SANDBOX.ask(self._special_tokens.line(grammar))
        except SandboxExceeded:
            return False
        return True


def _as_written(tokenizer: str) -> str:
    """Return a tokenizer's JSON such that it encodes text as it stands, whole, and no more.

    Where only one text can follow, the mask is that text's next token: composed letters (NFC)
    would then be other bytes than the grammar's.
    """
    spec = json.loads(tokenizer) | {"padding": None, "truncation": None}
    if '"ByteLevel"' in json.dumps(spec["decoder"]):
        spec["normalizer"] = None
    return json.dumps(spec)


def _token_ids(row: NDArray[np.int32]) -> NDArray[np.intp]:
    """Return the tokens that a mask allows."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def _special_tokens(tokenizer: LLTokenizer) -> SpecialTokens:
    ids = filter(tokenizer.is_special_token, range(tokenizer.vocab_size))
    texts = {i: tokenizer.decode_bytes([i]).decode(errors="replace") for i in ids}
    return SpecialTokens(tokenizer.vocab_size, texts)

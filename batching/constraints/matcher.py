"""The position of a completion in its grammar, and llguidance's errors."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_MESSAGE: Final = 300
# llguidance's state, and options that clients cannot set.
_AFTER_THE_REASON: Final = ("<state>", "<non-verbose/>", " Enable '")
_WORDS: Final = {"NoExtensionBias": "no text follows the grammar"}


class GrammarPanic(Exception):
    """llguidance, or the tokenizer behind it, panicked."""


@contextmanager
def panics_as_exceptions() -> Iterator[None]:
    """Raise GrammarPanic where Rust panics: its own is no Exception, and would end a thread."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise GrammarPanic(type(error).__name__) from error


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as llguidance sees it, with the size of the model's vocabulary in tokens.

    ends: the end tokens, all of them in the model's vocabulary.
    """

    tokenizer: LLTokenizer
    num_tokens: int
    ends: Sequence[int]

    def empty_row(self) -> NDArray[np.int32]:
        return np.zeros(-(-self.num_tokens // 32), np.int32)

    def only_ends(self) -> NDArray[np.int32]:
        """Return a row that allows the end tokens only."""
        bits = np.zeros(32 * len(self.empty_row()), np.uint8)
        bits[list(self.ends)] = 1
        return np.packbits(bits, bitorder="little").view("<i4")


class GrammarMatcher:
    """The position of one completion in its grammar.

    Nothing here raises: a failure of llguidance is the error of this request alone.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._failure: str | None = None

    @property
    def num_free(self) -> int:
        """Each token needs a mask."""
        return 0

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """Write which tokens may follow: bit `i % 32` of word `i // 32` stands for token i.

        `row` has a bit for each token of the model's vocabulary, rounded up to words.
        """
        mask = self._call(self._mask, None)
        row[:] = self._vocabulary.only_ends() if mask is None else mask[: len(row)]
        num_unused = len(row) * 32 - self._vocabulary.num_tokens
        row[-1:].view(np.uint32)[:] &= np.uint32(0xFFFFFFFF >> num_unused)

    def accept(self, token_id: int) -> None:
        """Advance by a generated token, the end token included."""
        self._call(lambda: self._matcher.consume_token(token_id), False)

    @property
    def is_complete(self) -> bool:
        """True when nothing but the end may follow."""
        return self._call(self._matcher.is_stopped, False) and self.error is None

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; the mask is then only the end."""
        problem = self._call(self._problem, None)
        return problem if self._failure is None else self._failure

    def fork(self) -> "GrammarMatcher":
        """Return an independent matcher at the same position."""
        # One that has failed never uses its matcher again, so that may be shared.
        matcher = self._call(self._matcher.deep_copy, self._matcher)
        fork = GrammarMatcher(matcher, self._vocabulary)
        fork._failure = self._failure
        return fork

    def _call(self, func: Callable[[], T], otherwise: T) -> T:
        """Call llguidance, unless it has failed; what it raises is an error that stays."""
        if self._failure is not None:
            return otherwise
        try:
            with panics_as_exceptions():
                return func()
        except Exception as error:
            # Not its text, which may contain the prompt.
            logger.error("llguidance failed: %s", type(error).__name__)
            self._failure = "the grammar cannot be followed any further"
            return otherwise

    def _mask(self) -> NDArray[np.int32]:
        # A tokenizer can know more tokens than its model.
        whole = np.empty(-(-self._vocabulary.tokenizer.vocab_size // 32), np.int32)
        self._matcher.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
        if np.count_nonzero(whole) == 1:
            self._spell_out(whole.view(np.uint32))
        return whole

    def _spell_out(self, whole: NDArray[np.uint32]) -> None:
        """Replace a special token whose text has to follow as text by the first token of it.

        Where only one text can follow, llguidance encodes it, special tokens included, and then
        does not accept them.
        """
        index = int(np.flatnonzero(whole)[0])
        word = int(whole[index])
        token_id = 32 * index + word.bit_length() - 1
        tokenizer = self._vocabulary.tokenizer
        if word.bit_count() > 1 or not tokenizer.is_special_token(token_id):
            return
        first = tokenizer.greedy_tokenize(tokenizer.decode_str([token_id]))[0]
        # Where the grammar asks for the token itself, its text cannot follow.
        if self._matcher.validate_tokens([first]):
            whole[index] = 0
            whole[first // 32] = 1 << first % 32

    def _problem(self) -> str | None:
        return reason_of(self._matcher.get_error()) if self._matcher.is_error() else None


def reason_of(message: str) -> str:
    """Return one line of llguidance's message, without the grammar's source."""
    for mark in _AFTER_THE_REASON:
        message = message.partition(mark)[0]
    lines: list[str] = []
    for line in message.splitlines():
        if line.partition("|")[0].strip().isdigit():
            break
        lines += line.split()
    text = " ".join(lines)
    if len(text) > _MAX_MESSAGE:
        # The reason is at the end, after a pattern as long as the client made it.
        text = f"{text[: _MAX_MESSAGE // 3]} ... {text[-_MAX_MESSAGE // 2 :]}"
    return _WORDS.get(text, text)

"""The process in which grammars are tried: each in a child with limits of its own, which may die of it.

llguidance counts fuel for most of what it does, but not for all: a few kilobytes of
`patternProperties` take minutes, and a long chain of rules overflows the stack, which would
take the server down.

`batching.constraints.compile_limits` runs this file: the first line is the vocabulary, each other one
a grammar, for which a child is forked and whose exit status is the answer.  A fork costs
milliseconds, where a new interpreter with llguidance takes a tenth of a second.  The file must not
import anything of the project, which would take seconds.
"""

import json
import os
import resource
import threading
from collections.abc import Mapping
from contextlib import suppress
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

_CPU_SECONDS: Final = 2
_MEMORY_BYTES: Final = 1 << 30
# A thread has eight times as much on Linux, and more on a Mac.
_STACK_BYTES: Final = 1 << 20
_NUM_BYTES: Final = 256


class SpecialTokens(NamedTuple):
    """What grammars can name of a vocabulary: its special tokens by text, every token by id."""

    num_tokens: int
    texts: Mapping[int, str]

    def encode(self) -> bytes:
        return json.dumps([self.num_tokens, list(self.texts.items())]).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> "SpecialTokens":
        num_tokens, texts = json.loads(encoded)
        return cls(num_tokens, dict(texts))


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


def byte_tokenizer(tokens: SpecialTokens) -> LLTokenizer:
    """Return what grammars are tried with: the texts of other tokens do not matter to a compiler."""
    return LLTokenizer(TokenizerWrapper(_Bytes(tokens)))


def compile_with_little_stack(grammar: str, tokenizer: LLTokenizer) -> bool:
    """Compile a grammar; False if that raises, which it never should."""
    is_done = threading.Event()

    def compile_once() -> None:
        LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        is_done.set()

    before = threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=compile_once)
    thread.start()
    threading.stack_size(before)
    thread.join()
    return is_done.is_set()


def limit(kind: int, amount: int) -> None:
    """Limit this process, where the system knows such a limit; else the wall clock remains."""
    # At a hard limit of its time a process is killed, as it may be from outside.
    hard = amount + 1 if kind == resource.RLIMIT_CPU else amount
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (amount, hard))


def main() -> None:
    """Try grammars until the server closes its end."""
    with open(0, "rb") as lines, open(0, "wb", closefd=False) as answers:
        tokenizer = byte_tokenizer(SpecialTokens.decode(lines.readline()))
        for line in lines:
            answers.write(b"%d\n" % _exit_status(json.loads(line), tokenizer))
            answers.flush()


def _exit_status(grammar: str, tokenizer: LLTokenizer) -> int:
    """Return that of a child that compiles a grammar, or the negative of the signal it died of."""
    child = os.fork()
    if not child:
        status = 1
        try:
            _limit_this_process()
            status = 0 if compile_with_little_stack(grammar, tokenizer) else 1
        finally:
            os._exit(status)
    _, wait_status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(wait_status)


def _limit_this_process() -> None:
    limit(resource.RLIMIT_CPU, _CPU_SECONDS)
    limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    # What is open stays so.
    limit(resource.RLIMIT_NOFILE, 0)


if __name__ == "__main__":
    main()

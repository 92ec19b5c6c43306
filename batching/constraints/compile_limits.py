"""Limits on compiling a grammar, tested in a process that may die of it.

llguidance counts fuel for most of what it does, but not for all: a few kilobytes of
`patternProperties` take minutes, and a long chain of rules overflows the stack, which would
take the server down.  So a grammar is first compiled in a process with limits of its own, by
running this file: it must not import anything of the project, which would take seconds.
"""

import json
import resource
import signal
import subprocess
import sys
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
# On a machine so loaded that the process gets a tenth of a core.
_WALL_SECONDS: Final = 20.0
# Signals that no limit here sends: of a supervisor, a terminal, or a system without memory.
_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_MEMORY_BYTES: Final = 1 << 30
# A thread has eight times as much on Linux, and more on a Mac.
_STACK_BYTES: Final = 1 << 20
_NUM_BYTES: Final = 256


class SpecialTokens(NamedTuple):
    """What grammars can name of a vocabulary: its special tokens by text, every token by id."""

    num_tokens: int
    texts: Mapping[int, str]


class CompileInterrupted(Exception):
    """What became of the process says nothing of the grammar."""


def encode_input(grammar: str, tokens: SpecialTokens) -> bytes:
    return json.dumps([grammar, tokens.num_tokens, list(tokens.texts.items())]).encode()


def compiles_within_limits(
    grammar: str, tokens: SpecialTokens, *, wall_seconds: float = _WALL_SECONDS
) -> bool:
    """True if a grammar compiles, or is found to be invalid, within the limits.

    Raises:
        CompileInterrupted: the process was ended for another reason, or there was none.
    """
    # -P: the modules beside this file must not hide the standard library's.
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(
            command,
            input=encode_input(grammar, tokens),
            timeout=wall_seconds,
            capture_output=True,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        raise CompileInterrupted from None
    if -done.returncode in _FROM_OUTSIDE:
        raise CompileInterrupted
    return done.returncode == 0


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


def compile_with_little_stack(encoded: bytes) -> bool:
    """Compile the grammar of `encode_input`; False if that raises, which it never should."""
    grammar, num_tokens, texts = json.loads(encoded)
    tokens = SpecialTokens(num_tokens, dict(texts))
    is_done = threading.Event()

    def compile_once() -> None:
        tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(tokens)))
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


if __name__ == "__main__":
    limit(resource.RLIMIT_CPU, _CPU_SECONDS)
    limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    sys.exit(0 if compile_with_little_stack(sys.stdin.buffer.read()) else 1)

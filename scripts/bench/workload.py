"""What clients say: text from a seed, in conversations that begin differently.

A prefix cache must find nothing by accident, so every first question begins with words of its own,
other ones in each round and in the warm-up; whatever shall be shared is shared by its scenario.
Lengths are in words, about as many as tokens; reports tell the tokens that the server counted.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from scripts.bench.words import WORDS

# Four of some 350 words: as good as never the same twice.
_OPENING_WORDS: Final = 4
_SENTENCE_WORDS: Final = 12
# Answers shall reach the token limit, so that all servers generate alike many tokens.
_REQUEST: Final = "Tell a very long and detailed story about all of this."


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user asks, turn by turn; most conversations have one turn."""

    questions: tuple[str, ...]
    system: str | None = None
    priority: str | None = None


class Writer:
    """Writes texts of common words; the same label gives the same texts."""

    def __init__(self, label: str) -> None:
        self._rng = random.Random(label)

    def question(self, num_words: int) -> str:
        """Return a text with words of its own first and a request for a long answer last."""
        return f"{self.text(num_words - len(_REQUEST.split()))} {_REQUEST}"

    def text(self, num_words: int) -> str:
        """Return sentences; the first is short, so that what makes it differ comes first."""
        words = iter(self._rng.choices(WORDS, k=max(num_words, _OPENING_WORDS)))
        sentences = [_sentence(list(islice(words, _OPENING_WORDS)))]
        sentences += map(_sentence, _groups(words, _SENTENCE_WORDS))
        return " ".join(sentences)


def _groups(words: Iterator[str], size: int) -> Iterator[list[str]]:
    while group := list(islice(words, size)):
        yield group


def _sentence(words: list[str]) -> str:
    return f"{' '.join(words).capitalize()}."

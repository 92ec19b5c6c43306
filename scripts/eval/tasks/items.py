"""The items of the tasks, from the tables beside this file: the same ones on every machine.

They are chosen by hashes, since Python's generators need not draw the same in every version.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

Item = Mapping[str, Any]

_FOLDER: Final = Path(__file__).parent
_NUM_CHOICES: Final = 4
_NUM_STORIES: Final = 80
_NUM_STRINGS: Final = 30  # of each kind


def facts() -> Iterator[Item]:
    """Yield questions with four choices, of which `answer` is the right one's index."""
    for line in _lines("facts.txt"):
        question, _, pairs = line.partition(" | ")
        table = dict(pair.split("=") for pair in pairs.split("; "))
        for name, answer in table.items():
            others = _by_hash(f"{question}{name}", set(table.values()) - {answer})
            choices = _by_hash(name + question, [answer, *others[: _NUM_CHOICES - 1]])
            yield {
                "question": question.format(name),
                "choices": choices,
                "answer": choices.index(answer),
            }


def cloze() -> Iterator[Item]:
    """Yield texts and the word that comes next, which they have had before or leave little choice of."""
    stories = (_story(number) for number in range(_NUM_STORIES))
    for line in (*_lines("cloze.txt"), *stories):
        text, _, word = line.rpartition(" ")
        yield {"text": text, "word": word}


def strings() -> Iterator[Item]:
    """Yield prompts with two examples each, and the line that has to follow."""
    for name, template, pair in _KINDS:
        for number in range(_NUM_STRINGS):
            *examples, (given, answer) = [pair(f"{name}{number}{part}") for part in range(3)]
            lines = [template.format(*example) for example in examples]
            last = template.format(given, "").rstrip()
            yield {"prompt": "\n".join([*lines, last]), "answer": answer}


def prose() -> Iterator[Item]:
    """Yield texts that break off before their last full stop, where a model does not end yet.

    Servers differ in whether the token that ends a completion has a log probability.
    """
    for line in _lines("prose.txt"):
        yield {"text": line}


def _lines(name: str) -> list[str]:
    text = (_FOLDER / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def _words() -> list[list[str]]:
    """Return names, things, and words to copy."""
    return [line.split() for line in _lines("words.txt")]


def _number(key: str) -> int:
    return int.from_bytes(sha256(key.encode()).digest()[:8])


def _by_hash(key: str, values: set[str] | Sequence[str]) -> list[str]:
    return sorted(values, key=lambda value: sha256(f"{key} {value}".encode()).digest())


def _story(number: int) -> str:
    key = f"story {number}"
    names, things, _ = _words()
    (a, b, *_), (thing, *_) = _by_hash(key, names), _by_hash(key, things)
    stories = _lines("stories.txt")
    return stories[number % len(stories)].format(a=a, b=b, thing=thing)


def _copied(key: str) -> tuple[str, str]:
    words = " ".join(_by_hash(key, _words()[-1])[: 3 + _number(key) % 5])
    return words, words


def _last(key: str) -> tuple[str, str]:
    words = _by_hash(key, _words()[-1])[: 3 + _number(key) % 3]
    return " ".join(words), words[-1]


def _sum(key: str) -> tuple[str, str]:
    number = _number(key)
    first, second = 1 + number % 9, 1 + number // 9 % 9
    return f"{first} + {second}", str(first + second)


def _counted(key: str) -> tuple[str, str]:
    number = _number(key)
    first, step = number % 40, 1 + number // 40 % 3
    *given, last = (str(first + place * step) for place in range(6))
    return ", ".join(given), last


_KINDS: Final[Sequence[tuple[str, str, Callable[[str], tuple[str, str]]]]] = (
    ("copied", "Words: {}\nSame words: {}", _copied),
    ("last", "Words: {}\nLast word: {}", _last),
    ("sum", "{} = {}", _sum),
    ("counted", "{}, {}", _counted),
)

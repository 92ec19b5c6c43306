"""PEFT's patterns: values of single modules by regular expressions on their names."""

import re
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_MAX_PATTERNS: Final = 1_000
_MAX_LENGTH: Final = 200
# Python's regular expressions try all ways to match, and hold the interpreter's lock: a hostile one must not be
# able to have more than some thousands of them.
_MAX_CHOICES: Final = 2
# All are tried with the name of each layer.
_MAX_WITH_CHOICES: Final = 32
_CHOICE: Final = re.compile(r"[*+?{]|\(")
_REPEATED_GROUP: Final = re.compile(r"\)[*+{]")


class ModulePatterns(Generic[T]):
    """Values of modules; PEFT takes that of the first pattern that is a module's name or the end of it."""

    def __init__(self, values: Mapping[str, T]) -> None:
        """Raises ValueError for a pattern that is not read."""
        if len(values) > _MAX_PATTERNS:
            raise ValueError(f"has {len(values)} patterns; the limit is {_MAX_PATTERNS}")
        num_open = sum(_CHOICE.search(pattern) is not None for pattern in values)
        if num_open > _MAX_WITH_CHOICES:
            raise ValueError(
                f"has {num_open} patterns with choices; the limit is {_MAX_WITH_CHOICES}"
            )
        self._values = [(_compiled(pattern), value) for pattern, value in values.items()]

    def get(self, name: str, default: T) -> T:
        found = (value for pattern, value in self._values if pattern.match(name))
        return next(found, default)


def _compiled(pattern: str) -> re.Pattern[str]:
    is_short = len(pattern) <= _MAX_LENGTH and len(_CHOICE.findall(pattern)) <= _MAX_CHOICES
    if not is_short or _REPEATED_GROUP.search(pattern):
        raise ValueError(
            f"has the pattern {pattern!r:.100}, which is too long or has too many choices"
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError):
        raise ValueError(
            f"has the pattern {pattern!r:.100}, which is no regular expression"
        ) from None

"""What the ranks of a model agree on while they open it, so that all of them take the same way."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import isnan, nan
from typing import Any, ClassVar, Final, TypeVar

from batching.errors import ModelLoadError, printable
from batching.ranks.links import Leader, Member

T = TypeVar("T")


class Consensus(ABC):
    """One rank among those that open a model; each of them asks the same in the same order.

    Rank 0 has the say: the others take what it has chosen, also where their own numbers round otherwise.
    """

    is_alone: ClassVar[bool] = False

    @abstractmethod
    def choose(self, value: T, choice: Callable[[Sequence[T]], T]) -> T:
        """Return what rank 0 chooses of the values of all ranks, which are in their order.

        value: of JSON, NaN included; it differs between ranks, `choice` does not.

        Raises:
            RankLost: a rank is gone.
        """

    def each(self, func: Callable[[], T]) -> T:
        """Call a function, which needs no other rank, on every rank; return its result on this one.

        Raises:
            ModelLoadError: the function has raised on one of them; all raise it.
            RankLost: a rank is gone.
        """
        result, error = None, None
        try:
            result = func()
        except Exception as raised:
            error = raised
        reasons = self.choose(_reason(error), union)
        if error is not None:
            raise error
        for rank, reason in enumerate(reasons):
            if reason:
                raise ModelLoadError(f"rank {rank}: {reason}")
        return result  # type: ignore[return-value]

    def check_same(self, what: str, text: str) -> None:
        """Check that a text is the same on all ranks; `what` names it in the error.

        Raises:
            ModelLoadError: it is not; all raise it.
            RankLost: a rank is gone.
        """
        expected, *others = self.choose([text], union)
        for rank, found in enumerate(others, start=1):
            if found != expected:
                raise ModelLoadError(f"rank {rank} has {what} {found}, rank 0 has {expected}")


def _reason(error: Exception | None) -> list[str]:
    """Return why a rank has failed; an empty text if it has not."""
    if error is None:
        return [""]
    text = printable(str(error))
    return [text if isinstance(error, ModelLoadError) else f"{type(error).__name__}: {text}"]


class Alone(Consensus):
    """The only rank."""

    is_alone = True

    def choose(self, value: T, choice: Callable[[Sequence[T]], T]) -> T:
        return choice([value])

    def each(self, func: Callable[[], T]) -> T:
        return func()


ALONE: Final = Alone()


class Leading(Consensus):
    """Rank 0."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def choose(self, value: T, choice: Callable[[Sequence[T]], T]) -> T:
        of_others: list[T] = [json.loads(message) for message in self._leader.receive()]
        chosen = choice([value, *of_others])
        self._leader.send(_written(chosen))
        return chosen


class Following(Consensus):
    """Any other rank."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def choose(self, value: T, choice: Callable[[Sequence[T]], T]) -> T:
        self._member.send(_written(value))
        chosen: T = json.loads(self._member.receive())
        return chosen


def _written(value: object) -> bytes:
    return json.dumps(value).encode()


def largest(lists: Sequence[list[float]]) -> list[float]:
    """Return the largest number at each place; NaN if one of them is."""
    return [nan if any(map(isnan, each)) else max(each) for each in zip(*lists, strict=True)]


def smallest(lists: Sequence[list[int]]) -> list[int]:
    return [min(numbers) for numbers in zip(*lists, strict=True)]


def union(lists: Sequence[list[Any]]) -> list[Any]:
    return [each for some in lists for each in some]


def first(values: Sequence[T]) -> T:
    """Return that of rank 0."""
    return values[0]

"""How the ranks of one model reach each other, beside the collectives that they compute."""

from collections.abc import Sequence
from typing import Protocol

from batching.errors import RankLost, RankRefused, RanksEnded

__all__ = ["Leader", "Member", "RankLost", "RankRefused", "RanksEnded"]


class Leader(Protocol):
    """Rank 0's side."""

    @property
    def num_ranks(self) -> int:
        """Itself included."""
        ...

    def send(self, message: bytes) -> None:
        """Send a message to each other rank; messages arrive in the order in which they are sent.

        Raises:
            RankLost: one of them is gone.
        """
        ...

    def receive(self) -> Sequence[bytes]:
        """Wait for one message of each other rank; return them in the order of the ranks.

        Raises:
            RankLost: one of them is gone.
        """
        ...

    def check(self) -> None:
        """Find out whether a rank is gone, which takes up to a second: something has failed that all ranks do.

        Raises:
            RankLost: one is.
        """
        ...

    def limit(self, seconds: float | None) -> None:
        """Count this rank as lost if it does not call this again within so many seconds; None is no limit.

        Time in which it waits for a message is that of another rank, and the limit begins again behind it.
        """
        ...


class Member(Protocol):
    """The side of any other rank."""

    @property
    def rank(self) -> int: ...

    def send(self, message: bytes) -> None:
        """Send a message to rank 0.

        Raises:
            RankLost: rank 0 is gone.
        """
        ...

    def receive(self) -> bytes:
        """Wait for a message of rank 0.

        Raises:
            RankLost: rank 0 is gone.
        """
        ...

    def limit(self, seconds: float | None) -> None:
        """Bound what this rank does; see `Leader`."""
        ...

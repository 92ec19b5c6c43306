"""What a store has done."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

# How much of a measurement is left when the next one is taken.
_MEMORY: Final = 0.95


class Skip(StrEnum):
    """Why something was not written, or not read."""

    QUEUE_FULL = "queue_full"
    NO_ROOM = "no_room"
    WRITE_LIMIT = "write_limit"
    FAILED = "failed"
    EVICTED = "evicted"
    READING_IS_SLOWER = "reading_is_slower"


@dataclass
class Rate:
    """What a unit has taken lately, in seconds; one thread adds to it."""

    _seconds: float = 0.0
    _num: float = 0.0

    def add(self, num: float, seconds: float) -> None:
        self._seconds = _MEMORY * self._seconds + seconds
        self._num = _MEMORY * self._num + num

    @property
    def seconds(self) -> float:
        """Of one unit; 0 before anything was measured."""
        return self._seconds / self._num if self._num else 0.0


@dataclass
class StoreStats:
    """Counts of entries and bytes; each has one writing thread.

    num_from_host: entries that were in the host's memory when they were needed.
    num_lost: of those that were asked for, how many were deleted or could not be read.
    num_damaged: how many were not what was written.
    reading, restoring: of a byte, from the disk, and to the pool.
    saving, writing: of an entry, from the pool to the queue, and from there to the disk.
    """

    num_read: int = 0
    bytes_read: int = 0
    num_from_host: int = 0
    num_written: int = 0
    bytes_written: int = 0
    num_lost: int = 0
    num_damaged: int = 0
    reading: Rate = field(default_factory=Rate)
    saving: Rate = field(default_factory=Rate)
    writing: Rate = field(default_factory=Rate)
    restoring: Rate = field(default_factory=Rate)
    skipped: Counter[Skip] = field(default_factory=Counter)

"""Measures how long cached blocks live and stay unused, which tells whether the pool is large enough."""

from collections.abc import Sequence
from typing import Final, NamedTuple


class BlockAges(NamedTuple):
    """Ages of cached contents, in seconds.

    lifetimes: the times of evicted contents since they became findable.
    idle_times: the times of the same contents since the last request released them.
    reuse_gaps: from the release of contents by the last request to their reuse by another.
    """

    lifetimes: Sequence[float]
    idle_times: Sequence[float]
    reuse_gaps: Sequence[float]


NO_AGES: Final = BlockAges((), (), ())


class BlockAgeRecorder:
    """Collects ages until they are taken, at most `_CAPACITY` of each kind."""

    _CAPACITY = 4096

    def __init__(self) -> None:
        self._ages: tuple[list[float], list[float], list[float]] = ([], [], [])

    def evicted(self, lifetime: float, idle_time: float) -> None:
        lifetimes, idle_times, _ = self._ages
        if len(lifetimes) < self._CAPACITY:
            lifetimes.append(lifetime)
            idle_times.append(idle_time)

    def reused(self, gap: float) -> None:
        gaps = self._ages[2]
        if len(gaps) < self._CAPACITY:
            gaps.append(gap)

    def take(self) -> BlockAges:
        """Return what was collected since the last time; the caller owns it."""
        if not any(self._ages):
            return NO_AGES
        ages, self._ages = self._ages, ([], [], [])
        return BlockAges(*ages)

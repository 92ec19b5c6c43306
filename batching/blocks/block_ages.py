"""How long the contents of blocks live and lie unused: the measure of how well the pool fits."""

from collections.abc import Sequence
from typing import Final, NamedTuple


class BlockAges(NamedTuple):
    """What happened to cached contents, in seconds.

    lifetimes: of evicted contents, from when they could be found first.
    idle_times: of the same, from when the last request let go of them.
    reuse_gaps: from when the last request let go of contents to when another one took them.
    """

    lifetimes: Sequence[float]
    idle_times: Sequence[float]
    reuse_gaps: Sequence[float]


NO_AGES: Final = BlockAges((), (), ())


class BlockAgeRecorder:
    """Collects ages until somebody takes them, the first `_CAPACITY` of each kind.

    Where nobody does, it is full for good and costs a comparison a block.
    """

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
        """Return what was collected since the last time; whoever takes it owns it."""
        if not any(self._ages):
            return NO_AGES
        ages, self._ages = self._ages, ([], [], [])
        return BlockAges(*ages)

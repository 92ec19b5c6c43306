"""How much may be written to a disk in a day, which its wear depends on."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from batching.host.private_files import replace_private

_DAY: Final = 24 * 3600.0
# The count is on disk, for the next start; it is written after so many bytes.
_SAVED_EVERY: Final = 1 << 28


class WriteLimit:
    """Counts what is written, over the days of the clock; a clock that is put back begins a new day.

    max_bytes: of a day; None is no limit.
    """

    def __init__(
        self, file: Path, max_bytes: int | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._clock = clock
        self._day, self._num_bytes = self._read()
        self._num_saved = self._num_bytes

    @property
    def num_bytes(self) -> int:
        """What was written today."""
        self._begin_day()
        return self._num_bytes

    def has_room(self, num_bytes: int) -> bool:
        return self._max_bytes is None or self.num_bytes + num_bytes <= self._max_bytes

    def add(self, num_bytes: int) -> None:
        self._begin_day()
        self._num_bytes += num_bytes
        if self._num_bytes >= self._num_saved + _SAVED_EVERY:
            self.save()

    def save(self) -> None:
        with suppress(OSError):
            replace_private(self._file, json.dumps([self._day, self._num_bytes]))
        self._num_saved = self._num_bytes

    def _begin_day(self) -> None:
        day = int(self._clock() // _DAY)
        if day != self._day:
            self._day, self._num_bytes, self._num_saved = day, 0, 0

    def _read(self) -> tuple[int, int]:
        try:
            day, num_bytes = json.loads(self._file.read_text(encoding="utf-8"))
            return int(day), int(num_bytes)
        except (OSError, ValueError, TypeError, OverflowError):
            return 0, 0

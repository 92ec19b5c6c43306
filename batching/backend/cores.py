"""How many cores this process may use: those it may run on, and its container's part of them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batching.backend.control_groups import control_groups, read_text


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores that the process may run on, and of how many its control groups let it use the time.

    quota: None is all.
    """

    available: int
    quota: float | None

    @property
    def count(self) -> int:
        """Return how many threads compute at once, and never are all stopped for the quota."""
        of_quota = self.available if self.quota is None else int(self.quota)
        return max(1, min(self.available, of_quota))

    def __str__(self) -> str:
        of_quota = "" if self.quota is None else f", of which the control group has {self.quota:g}"
        return f"{self.available} cores{of_quota}"


def usable_cores(root: Path = Path("/")) -> Cores:
    """Return what the system allows.  `root` is that of the file system."""
    has_affinity = hasattr(os, "sched_getaffinity")
    available = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return Cores(available, min(_quotas(root), default=None))


def _quotas(root: Path) -> Iterator[float]:
    for folder, version in control_groups(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        words = " ".join(read_text(folder / name) for name in names).split()
        # No limit is -1 or "max".
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            yield int(words[0]) / int(words[1])

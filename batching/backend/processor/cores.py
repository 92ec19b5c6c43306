"""How many cores this process may use: those it may run on, and its container's part of them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batching.host.control_groups import control_groups, read_text

# With so many threads one fewer costs little, and the event loop would delay all of them.
_SPARES_ONE_FROM: Final = 8

Nodes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores that the process may run on, and of how many its control groups let it use the time.

    hardware_threads: several of a core share its arithmetic units.
    nodes: hardware threads by NUMA node, each of which has its own memory.
    quota: None is all.
    """

    available: int
    hardware_threads: int
    nodes: Nodes
    quota: float | None

    @property
    def max_threads(self) -> int:
        """Return how many threads run at once, and never are all stopped for the quota."""
        quota = self.hardware_threads if self.quota is None else int(self.quota)
        return max(1, min(self.hardware_threads, quota))

    @property
    def count(self) -> int:
        """Return how many threads should compute: one on each core.

        On many cores one is left to the event loop, unless it has a hardware thread besides.
        """
        count = min(self.available, self.max_threads)
        return count - (count == self.max_threads and count >= _SPARES_ONE_FROM)

    def nodes_of(self, num_threads: int) -> Nodes:
        """Return the nodes that so many threads are divided among; none if they fit on one.

        Which one is left to the system: of several servers each would choose the first.
        """
        largest = max(map(len, self.nodes), default=0)
        return self.nodes if len(self.nodes) > 1 and num_threads > largest else ()

    def __str__(self) -> str:
        has_more = self.hardware_threads > self.available
        with_threads = f" with {self.hardware_threads} hardware threads" if has_more else ""
        on_nodes = f" on {len(self.nodes)} NUMA nodes" if len(self.nodes) > 1 else ""
        of_quota = "" if self.quota is None else f", of which the control group has {self.quota:g}"
        return f"{self.available} cores{with_threads}{on_nodes}{of_quota}"


def usable_cores(root: Path = Path("/")) -> Cores:
    """Return what the system allows.  `root` is that of the file system."""
    has_affinity = hasattr(os, "sched_getaffinity")
    allowed = os.sched_getaffinity(0) if has_affinity else set(range(os.cpu_count() or 1))
    return Cores(
        available=_num_cores(root, allowed),
        hardware_threads=len(allowed),
        nodes=_nodes(root, allowed),
        quota=min(_quotas(root), default=None),
    )


def _num_cores(root: Path, allowed: set[int]) -> int:
    folder = root / "sys/devices/system/cpu"
    siblings = (
        read_text(folder / f"cpu{thread}/topology/thread_siblings_list") or thread
        for thread in allowed
    )
    return len(set(siblings))


def _nodes(root: Path, allowed: set[int]) -> Nodes:
    nodes = (
        tuple(sorted(allowed & _listed(read_text(path))))
        for path in sorted(root.glob("sys/devices/system/node/node*/cpulist"))
    )
    return tuple(node for node in nodes if node)


def _listed(text: str) -> set[int]:
    """Read a list of the kernel, such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _quotas(root: Path) -> Iterator[float]:
    for folder, version in control_groups(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        words = " ".join(read_text(folder / name) for name in names).split()
        # No limit is -1 or "max".
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            yield int(words[0]) / int(words[1])

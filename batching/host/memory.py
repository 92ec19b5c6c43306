"""Reads from Linux's files how much memory this process may take."""

import re
from pathlib import Path
from typing import Final, NamedTuple

from batching.host.control_groups import control_groups, read_text


class _Names(NamedTuple):
    """The files of one version of control groups, and the line of `stat` with bytes that can be reclaimed."""

    limit: str
    used: str
    reclaimable: str


_NAMES: Final = {
    1: _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names("memory.max", "memory.current", "inactive_file"),
}


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit of this process's control groups in bytes; None if there is none."""
    limits = (
        _number(group / _NAMES[version].limit) for group, version in control_groups(root, "memory")
    )
    return min((limit for limit in limits if limit is not None), default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still use; None where the system does not say.

    The page cache counts as free, since it holds the model that has just been read.
    """
    left = [
        _left_of_the_machine(root),
        *(_left(*group) for group in control_groups(root, "memory")),
    ]
    return min((number for number in left if number is not None), default=None)


def _left_of_the_machine(root: Path) -> int | None:
    kilobytes = re.search(
        r"^MemAvailable: +(\d+) kB$", read_text(root / "proc/meminfo"), re.MULTILINE
    )
    return int(kilobytes[1]) * 1024 if kilobytes else None


def _left(group: Path, version: int) -> int | None:
    names = _NAMES[version]
    limit, used = _number(group / names.limit), _number(group / names.used)
    if limit is None or used is None:
        return None
    stat = read_text(group / "memory.stat")
    reclaimable = re.search(rf"^{names.reclaimable} (\d+)$", stat, re.MULTILINE)
    return max(0, limit - used + (int(reclaimable[1]) if reclaimable else 0))


def _number(path: Path) -> int | None:
    """Return what a file says; None if there is no such file, or for the word `max`."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None

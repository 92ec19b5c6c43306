"""How much memory Linux lets this process take, read from its files."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple


class _Names(NamedTuple):
    """What one version of control groups calls its files, and what in `stat` can be reclaimed."""

    mount: str
    limit: str
    used: str
    reclaimable: str


_V1: Final = _Names(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
_V2: Final = _Names("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes that the control groups of this process allow it; None if all there are."""
    limits = (_number(group / names.limit) for group, names in _groups(root))
    return min((limit for limit in limits if limit is not None), default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still take; None where the system does not say.

    What the kernel keeps of files counts as free: a model that has just been read is there.
    """
    left = [_left_of_the_machine(root), *(_left(*group) for group in _groups(root))]
    return min((number for number in left if number is not None), default=None)


def _left_of_the_machine(root: Path) -> int | None:
    kilobytes = re.search(r"^MemAvailable: +(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(kilobytes[1]) * 1024 if kilobytes else None


def _left(group: Path, names: _Names) -> int | None:
    limit, used = _number(group / names.limit), _number(group / names.used)
    if limit is None or used is None:
        return None
    stat = _text(group / "memory.stat")
    reclaimable = re.search(rf"^{names.reclaimable} (\d+)$", stat, re.MULTILINE)
    return max(0, limit - used + (int(reclaimable[1]) if reclaimable else 0))


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of the control groups that this process is in, the innermost first.

    In a container the outermost is the container's own, whatever its name is outside.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _V1 if controllers else _V2
        group = Path(name.lstrip("/"))
        for path in (group, *group.parents):
            yield root / names.mount / path, names


def _number(path: Path) -> int | None:
    """Return what a file says; None if there is no such file, or for the word `max`."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""

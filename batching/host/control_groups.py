"""The control groups of Linux that this process is in, of version 1 or 2."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ControlGroup(NamedTuple):
    folder: Path
    version: int


def control_groups(root: Path, controller: str) -> Iterator[ControlGroup]:
    """Yield those that a controller limits, the innermost first.

    In a container the outermost is the container's own, whatever its name is outside.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = Path(name.lstrip("/"))
        for path in (group, *group.parents):
            yield ControlGroup(mount / path, 1 if controllers else 2)


def read_text(path: Path) -> str:
    """Return what a file says; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""

"""Files and folders that no other user can change."""

import errno
import os
import stat
from pathlib import Path


def open_private(path: Path) -> int:
    """Open a file for reading that no other user can change, shorten or replace, now or later.

    Raises:
        PermissionError: another user can.
        OSError: it is not there, is a link, or cannot be opened.
    """
    # It may be reached through a link: what that leads to is looked at, by its descriptor.
    folder = _open(path.parent, os.O_DIRECTORY)
    try:
        return _open(path.name, os.O_NOFOLLOW, folder)
    finally:
        os.close(folder)


def check_folder(folder: Path) -> None:
    """Raise OSError unless it is a folder in which this user alone can make and replace files."""
    os.close(_open(folder, os.O_DIRECTORY))


def replace_private(path: Path, text: str) -> None:
    """Write a file that this user alone can read; what reads it sees the former text, or all of this one.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(part, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def _open(path: Path | str, flags: int, folder: int | None = None) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "another user can write to it", str(path))
    return descriptor

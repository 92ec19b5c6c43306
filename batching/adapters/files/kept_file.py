"""A file that is kept open, and whose contents stay what they were."""

import errno
import hashlib
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PIECE_BYTES: Final = 8 << 20

# The bytes of a file, and when it was written and changed.
Stamp = tuple[int, int, int]


class ContentsChanged(Exception):
    """The file is not what was opened."""


class KeptFile:
    """An open file, which other programs may delete or replace, but whose contents must stay.

    It is read and never mapped: a process that reads a mapping of a file that was cut off is killed.
    It is closed when nothing refers to it any more.

    digest: SHA-256 of its contents.
    """

    def __init__(self, path: Path, root: Path, max_bytes: int) -> None:
        """Open a file, and read all of it once.

        root: the folder within which the file must lie, whatever links lead to it.

        Raises:
            ValueError: it lies outside, is no file, or too large; the text follows its name.
            ContentsChanged: it is being written.
            OSError: it cannot be opened or read.
        """
        self._descriptor = _open_within(path, root)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        # No other thread's file gets the descriptor while this one is read.
        self._lock = threading.Lock()
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("is not a file")
            if status.st_size > max_bytes:
                raise ValueError(f"has {status.st_size} bytes; the limit is {max_bytes}")
            self.size = status.st_size
            self._stamp = self.stamp()
            self.digest = self._present_digest()
            self.verify()
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._close.alive

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def close(self) -> None:
        with self._lock:
            self._close()

    def read(self, start: int, length: int) -> bytes:
        """Return some of its bytes.

        Raises:
            ContentsChanged: there are not so many any more.
            OSError: they cannot be read, or it is closed.
        """
        parts = []
        while length:
            with self._lock:
                self._check_open()
                part = os.pread(self._descriptor, min(length, _PIECE_BYTES), start)
            if not part:
                raise ContentsChanged
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return b"".join(parts)

    def pieces(self, start: int, length: int) -> Iterator[bytes]:
        """Yield some of its bytes in pieces of a few MiB, which have a multiple of four bytes except for the last."""
        stop = start + length
        for at in range(start, stop, _PIECE_BYTES):
            yield self.read(at, min(_PIECE_BYTES, stop - at))

    def stamp(self) -> Stamp:
        """Return what differs once something was done to it; reads nothing.

        Raises:
            OSError: it is closed.
        """
        with self._lock:
            self._check_open()
            status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def verify(self) -> None:
        """Check that it has the contents that it was opened with.

        Where its times say that something was done to it, such as deleting it, all is read again.

        Raises:
            ContentsChanged: it has others.
            OSError: it cannot be read, or is closed.
        """
        stamp = self.stamp()
        if stamp == self._stamp:
            return
        if stamp[0] != self.size or self._present_digest() != self.digest:
            raise ContentsChanged
        self._stamp = stamp

    def _check_open(self) -> None:
        if not self.is_open:
            raise OSError(errno.EBADF, "it is closed")

    def _present_digest(self) -> str:
        digest = hashlib.sha256()
        for piece in self.pieces(0, self.size):
            digest.update(piece)
        return digest.hexdigest()


def _open_within(path: Path, root: Path) -> int:
    """Open a file for reading; no link below the root is followed after it was resolved."""
    folder = root.resolve(strict=True)
    resolved = path.resolve(strict=True)
    if not resolved.is_relative_to(folder):
        raise ValueError("leads out of its folder")
    if resolved == folder:
        raise ValueError("is not a file")
    *folders, name = resolved.relative_to(folder).parts
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(folder, flags | os.O_DIRECTORY)
    for part in folders:
        parent = descriptor
        try:
            descriptor = os.open(part, flags | os.O_DIRECTORY, dir_fd=parent)
        finally:
            os.close(parent)
    try:
        # Opening a pipe must not wait for what writes to it.
        return os.open(name, flags | os.O_NONBLOCK, dir_fd=descriptor)
    finally:
        os.close(descriptor)

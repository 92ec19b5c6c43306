"""A data folder is used by one server at a time: it holds a lock on a file there while it runs."""

import fcntl
import os
from pathlib import Path
from typing import Final

_FILE: Final = "server.lock"


class FolderInUse(OSError):
    """Another server uses the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"another server uses {folder}; each server needs a folder of its own")


class FolderLock:
    """Keeps other servers out of a folder until it is closed or the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of an existing folder.

        Raises:
            FolderInUse: another server holds it.
            OSError: the folder cannot be written to, or its file system has no locks.
        """
        # The file stays: a server that waits to open it and one that deletes it could both hold a lock.
        self._file: Final = os.fdopen(
            os.open(folder / _FILE, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise FolderInUse(folder) from None
        except OSError:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

"""Which of the servers that share a folder are running: each holds a lock on a file while it runs."""

import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

_SUFFIX: Final = ".running"


class Presence:
    """Shows the other servers of a folder that this one is running.

    server_id: the name of this server among them.
    """

    def __init__(self, folder: Path | None) -> None:
        """Take the lock, and remove the files of servers that have ended.

        folder: None is a server that shares no folder.

        Raises:
            OSError: the folder cannot be written to, or its file system has no locks.
        """
        self.server_id: Final = secrets.token_hex(8)
        self._folder: Final = folder
        self._file: int | None = None
        if folder is not None:
            for left in folder.glob(f"*{_SUFFIX}"):
                self.is_running(left.stem)
            self._file = _create_locked(self._path(folder, self.server_id))

    def is_running(self, server_id: str) -> bool:
        """Return whether a server is running; one that has ended never runs again under its id."""
        assert self._folder is not None, "there are no others"
        path = self._path(self._folder, server_id)
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def close(self) -> None:
        if self._folder is not None and self._file is not None:
            self._path(self._folder, self.server_id).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    @staticmethod
    def _path(folder: Path, server_id: str) -> Path:
        return folder / f"{server_id}{_SUFFIX}"


def _create_locked(path: Path) -> int:
    """Create a file that is never seen without its lock; return its descriptor."""
    draft = path.with_suffix(".starting")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(path)
    except OSError:
        os.close(file)
        draft.unlink()
        raise
    return file

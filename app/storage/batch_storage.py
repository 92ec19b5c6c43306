"""The storage of files and batches: two stores over one database and one folder."""

import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Final

from app.storage.batches import BATCHES_SCHEMA, BatchStore
from app.storage.disk.database import Database
from app.storage.files import FILES_SCHEMA, FileLimits, FileStore

_DATABASE: Final = "batches.sqlite"
_FILES: Final = "files"
_WORK: Final = "work"
_WORK_SUFFIX: Final = ".sqlite"
_SCHEMA: Final = f"{FILES_SCHEMA}{BATCHES_SCHEMA}PRAGMA user_version = 2"
# Values that clients have stored with an earlier version are kept.
_UPGRADES: Final = {1: "ALTER TABLE batches DROP COLUMN server; PRAGMA user_version = 2"}

DEFAULT_LIMITS: Final = FileLimits()


class BatchStorage:
    """The files and batches of a folder, which no other server uses.

    What a server leaves behind in a crash is removed at the next start.

    files: the uploads of clients and the results of batches.
    batches: the batches and their statuses.
    """

    def __init__(
        self,
        limits: FileLimits = DEFAULT_LIMITS,
        folder: Path | None = None,
        clock: Callable[[], float] = time,
    ) -> None:
        """Open a folder, which is created if necessary; None is a temporary folder.

        Raises:
            OSError: the folder or a file in it cannot be read or written.
        """
        self.limits: Final = limits
        self.clock: Final = clock
        self._folder = folder
        self._remove_folder: Callable[[], object] = lambda: None
        if folder is not None:
            _make(folder)
        path = None if folder is None else folder / _DATABASE
        self._database: Final = Database(path, _SCHEMA, upgrades=_UPGRADES, synchronous="FULL")
        self.batches: Final = BatchStore(self._database)
        self.files: Final = FileStore(self._database, self._files_folder, limits, clock)
        if folder is not None:
            self._sweep()

    def work_path(self, batch_id: str) -> Path:
        """Return the path of the file for the results of a batch that runs."""
        return self._made_folder() / _WORK / f"{batch_id}{_WORK_SUFFIX}"

    def remove_work(self, batch_id: str) -> None:
        """Delete the results of a batch, which its files have now."""
        path = self.work_path(batch_id)
        for suffix in ("-wal", "-shm", ""):
            path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)

    def close(self) -> None:
        self._database.close()
        self._remove_folder()

    def _files_folder(self) -> Path:
        return self._made_folder() / _FILES

    def _made_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="mlx-batch-server-"))
            # Also at the end of a process that does not close it.
            self._remove_folder = weakref.finalize(
                self, shutil.rmtree, self._folder, ignore_errors=True
            )
            _make(self._folder)
        return self._folder

    def _sweep(self) -> None:
        """Delete what crashes have left."""
        self.files.delete_expired()
        self.files.sweep()
        for path in (self._made_folder() / _WORK).glob(f"*{_WORK_SUFFIX}"):
            if not self.batches.is_unfinished(path.stem):
                self.remove_work(path.stem)


def _make(folder: Path) -> None:
    for part in (folder, folder / _FILES, folder / _WORK):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)

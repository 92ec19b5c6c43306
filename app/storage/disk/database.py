"""SQLite databases in the data folder or in memory."""

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Final, Literal

_BUSY_TIMEOUT: Final = 5.0
# SQLite's codes of a file that it cannot read; an extended code has more than these bits.
_UNREADABLE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PRIMARY_CODE: Final = 0xFF

NO_UPGRADES: Final[Mapping[int, str]] = MappingProxyType({})


class StorageError(OSError):
    """The database cannot be read or written.

    The message is SQLite's and contains no text of a client, so it may be logged.
    """


class Database:
    """A connection that threads share; each transaction is atomic.

    Every call blocks for a moment, so call it in a worker thread.
    """

    def __init__(
        self,
        path: Path | None,
        schema: str,
        *,
        upgrades: Mapping[int, str] = NO_UPGRADES,
        synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
    ) -> None:
        """Open a database file in an existing folder; None is a database in memory.

        schema: statements that end with `PRAGMA user_version = ...`; they are executed unless the database
            has this version.
        upgrades: statements that are executed instead, by the version that the database has.
        synchronous: `FULL` keeps committed data if the machine loses power.

        Raises:
            OSError: the file cannot be read or written.
        """
        self._name: Final = "the database in memory" if path is None else str(path)
        self._lock: Final = Lock()
        if path is not None:
            # No other user of this machine may read prompts; the files beside it get the same mode.
            path.touch(mode=0o600)
        with self._readable_errors():
            self._connection: Final = sqlite3.connect(
                ":memory:" if path is None else path, _BUSY_TIMEOUT, check_same_thread=False
            )
        try:
            with self._readable_errors():
                self._prepare(schema, upgrades, synchronous)
        except OSError:
            self._connection.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all changes of the block, or none if it raises.

        Raises:
            StorageError: the database cannot be read or written.
        """
        with self._readable_errors(), self._lock, self._connection as connection:
            yield connection

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _prepare(self, schema: str, upgrades: Mapping[int, str], synchronous: str) -> None:
        version = int(schema.rpartition("=")[2].strip(" ;\n"))
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA synchronous = {synchronous}")
        self._connection.execute("PRAGMA foreign_keys = ON")
        (found,) = self._connection.execute("PRAGMA user_version").fetchone()
        if found != version:
            script = upgrades.get(found, schema)
            self._connection.executescript(f"BEGIN IMMEDIATE;\n{script};\nCOMMIT;")

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            # Errors that Python's module raises itself have no code.
            code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
            remedy = "; move the file away, and a new one is made" if code in _UNREADABLE else ""
            raise StorageError(f"{self._name}: {error}{remedy}") from None


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk, so that renamed files keep their names after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

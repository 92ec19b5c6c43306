"""The store of clients' files: what they upload, and what batches write for them.

A file is written under a temporary name, synced and renamed, and only then added to the database, so
that an incomplete file is never visible.  On disk a file is named by its id.
"""

import os
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from time import time
from typing import BinaryIO, Final, Generic, Literal, TypeVar

from app.storage.database import Database, sync_folder

T = TypeVar("T")
Order = Literal["asc", "desc"]

_DRAFT: Final = ".part"
# That the smallest file takes of a disk.
_LEAST_BYTES: Final = 4096
# Seconds after which a file without a row is what a crash has left, not what a server is adding.
_ORPHAN_AGE: Final = 3600.0

FILES_SCHEMA: Final = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    created INTEGER NOT NULL,
    expires INTEGER
);
CREATE INDEX files_of_owner ON files (owner, number);
"""
_COLUMNS: Final = "id, owner, purpose, filename, num_bytes, created, expires"


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits in bytes, of one file and of the files of all owners together."""

    max_file_bytes: int = 512 << 20
    max_total_bytes: int = 10 << 30


class FileTooLarge(Exception):
    """The file exceeds the limit of one file."""


class NoRoomForFile(Exception):
    """All files together would exceed their limit."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """expires: seconds since the epoch; None is never."""

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created: int
    expires: int | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: Sequence[T]
    has_more: bool

    @classmethod
    def of(cls, rows: Sequence[T], limit: int) -> "Page[T]":
        """Make a page of the rows, of which one more than the limit was asked for."""
        return cls(rows[:limit], len(rows) > limit)


class Draft:
    """A file that is being written under a temporary name."""

    def __init__(self, path: Path, check: Callable[[int], None]) -> None:
        """Create the file.

        check: called with the size in bytes before each write; raises if that is not allowed.
        """
        self.num_bytes = 0
        self._path: Final = path
        self._check: Final = check
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: Final[BinaryIO] = os.fdopen(descriptor, "wb")

    def write(self, data: bytes | bytearray) -> None:
        """Append.

        Raises:
            FileTooLarge, NoRoomForFile: with the data it is larger than allowed.
            OSError: it cannot be written.
        """
        self.num_bytes += len(data)
        self._check(self.num_bytes)
        self._file.write(data)

    def rename(self, path: Path) -> None:
        """Sync the file and give it its final name.

        Raises:
            OSError: the file cannot be written.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.rename(path)
        sync_folder(path.parent)

    def close(self) -> None:
        """Delete the file unless it was renamed."""
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


class FileStore:
    """Stores the files of each owner, who sees only their own."""

    def __init__(
        self,
        database: Database,
        folder: Callable[[], Path],
        server_id: str,
        limits: FileLimits,
        clock: Callable[[], float] = time,
    ) -> None:
        """`folder` returns the folder, which exists; it is not called before there is a file."""
        self._database: Final = database
        self._folder: Final = folder
        self._server_id: Final = server_id
        self._limits: Final = limits
        self._clock: Final = clock
        self._drafts: set[Draft] = set()
        # Of all files so far: what has ended since a draft began counts for it.
        self._ended_bytes = 0

    def path(self, file_id: str) -> Path:
        return self._folder() / file_id

    def begin(self, *, is_limited: bool = True) -> Draft:
        """Create a file to write to, for `end` or `discard`.

        is_limited: False for files that the server itself writes.

        Raises:
            NoRoomForFile: all files together have reached their limit.
            OSError: the file cannot be created.
        """
        before = self._total() - self._ended_bytes

        def check(num_bytes: int) -> None:
            if num_bytes > self._limits.max_file_bytes:
                raise FileTooLarge
            written = self._ended_bytes + sum(d.num_bytes for d in tuple(self._drafts))
            if before + written > self._limits.max_total_bytes:
                raise NoRoomForFile

        if is_limited:
            check(0)
        path = self._folder() / f"{self._server_id}.{secrets.token_hex(8)}{_DRAFT}"
        draft = Draft(path, check if is_limited else lambda _: None)
        self._drafts.add(draft)
        return draft

    def has_room(self) -> bool:
        """Return False if all files together are as large as they may be."""
        return self._total() < self._limits.max_total_bytes

    def end(self, draft: Draft, file_id: str) -> None:
        """Put a file on disk; it is not visible to clients before it is added.

        Raises:
            OSError: the file cannot be written.
        """
        draft.rename(self.path(file_id))
        self._ended_bytes += draft.num_bytes
        self._drafts.discard(draft)

    def discard(self, draft: Draft) -> None:
        """Delete a draft; one that has ended stays."""
        draft.close()
        self._drafts.discard(draft)

    def add(self, file: StoredFile) -> None:
        """Add a file that is on the disk.

        Raises:
            OSError: the database cannot be written.
        """
        with self._database.transaction() as database:
            insert_file(database, file)

    def get(self, owner: str, file_id: str) -> StoredFile | None:
        with self._database.transaction() as database:
            row = database.execute(
                f"SELECT {_COLUMNS} FROM files "
                "WHERE id = ? AND owner = ? AND (expires IS NULL OR expires > ?)",
                (file_id, owner, self._clock()),
            ).fetchone()
        return None if row is None else StoredFile(*row)

    def page(
        self, owner: str, *, after: str | None, limit: int, order: Order, purpose: str | None
    ) -> Page[StoredFile]:
        """Return an owner's files in order of creation, starting after the file `after`."""
        comparison, direction = ("<", "DESC") if order == "desc" else (">", "ASC")
        with self._database.transaction() as database:
            rows = database.execute(
                f"SELECT {_COLUMNS} FROM files WHERE owner = ?1 "
                "AND (expires IS NULL OR expires > ?2) AND (?3 IS NULL OR purpose = ?3) "
                f"AND (?4 IS NULL OR number {comparison} (SELECT number FROM files WHERE id = ?4)) "
                f"ORDER BY number {direction} LIMIT ?5",
                (owner, self._clock(), purpose, after, limit + 1),
            ).fetchall()
        return Page.of([StoredFile(*row) for row in rows], limit)

    def delete(self, owner: str, file_id: str) -> None:
        """Delete a file, if the owner has it.

        Raises:
            OSError: the database cannot be written.
        """
        with self._database.transaction() as database:
            deleted = database.execute(
                "DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)
            ).rowcount
        if deleted:
            self.path(file_id).unlink(missing_ok=True)

    def delete_expired(self) -> None:
        """Delete the files whose time is over, but for inputs of unfinished batches."""
        with self._database.transaction() as database:
            rows = database.execute(
                "DELETE FROM files WHERE expires <= ? "
                "AND id NOT IN (SELECT input_file_id FROM batches WHERE NOT is_finished) "
                "RETURNING id",
                (self._clock(),),
            ).fetchall()
        for (file_id,) in rows:
            self.path(file_id).unlink(missing_ok=True)

    def sweep(self, is_running: Callable[[str], bool]) -> None:
        """Delete what servers have left that ended while they wrote it."""
        with self._database.transaction() as database:
            known = {row[0] for row in database.execute("SELECT id FROM files")}
        for path in self._folder().iterdir():
            if path.suffix == _DRAFT:
                is_left = not is_running(path.name.partition(".")[0])
            else:
                is_left = path.name not in known and _age(path, self._clock()) > _ORPHAN_AGE
            if is_left:
                path.unlink(missing_ok=True)

    def _total(self) -> int:
        with self._database.transaction() as database:
            total: int = database.execute(
                "SELECT COALESCE(SUM(MAX(num_bytes, ?)), 0) FROM files", (_LEAST_BYTES,)
            ).fetchone()[0]
        return total


def insert_file(database: sqlite3.Connection, file: StoredFile) -> None:
    """Add a file within a transaction; one that is there already is replaced."""
    database.execute(
        f"INSERT OR REPLACE INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(file)
    )


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0

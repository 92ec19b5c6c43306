"""Files of clients on disk: what they upload, and what batches write for them.

A file is written under a temporary name, synced, renamed, and only then in the database, so that a
part of one is never taken for the whole.  Its name is a label: on disk it has its id.
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
    """In bytes; the total is that of all owners."""

    max_file_bytes: int = 512 << 20
    max_total_bytes: int = 10 << 30


class FileTooLarge(Exception):
    """A file is larger than one may be."""


class NoRoomForFile(Exception):
    """All files together would be larger than they may be."""


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
    """A file that is being written, under a name that no reader knows."""

    def __init__(self, path: Path, check: Callable[[int], None]) -> None:
        """`check` raises if a file may not have so many bytes."""
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
        """Give the file its name, when all of it is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.rename(path)
        sync_folder(path.parent)

    def close(self) -> None:
        """Delete what was written, unless it has got its name."""
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


class FileStore:
    """Keeps files of each owner, who sees no others."""

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
        """Begin to write a file, for `end` or `discard`.

        is_limited: False is for what the server writes.

        Raises:
            NoRoomForFile: all files together are as large as they may be.
            OSError: it cannot be created.
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
        """Have a file on the disk, which no client sees before it is added.

        Raises:
            OSError: it cannot be written.
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
        """Return files in the order of their creation, from the one that follows `after`."""
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

"""The store of clients' files: uploads, and results of batches.

A file is written under a temporary name, synced and renamed, and only then added to the database, so
that an incomplete file is never visible.  On disk a file is named by its id.  Those of each owner have a
limit of their own, so that no owner fills the disk for the others.
"""

import os
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from time import time
from typing import BinaryIO, Final, Generic, Literal, TypeVar

from app.storage.disk.database import Database, sync_folder
from app.storage.disk.quota import Account, Charge

T = TypeVar("T")
Order = Literal["asc", "desc"]

_DRAFT: Final = ".part"
# Bytes that the smallest file takes of a disk.
_LEAST_BYTES: Final = 4096

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
_NUM_BYTES: Final = """
SELECT COALESCE(SUM(num_bytes), 0) FROM (
    SELECT MAX(num_bytes, ?2) AS num_bytes FROM files WHERE owner = ?1
    UNION ALL
    SELECT json_extract(body, '$.num_bytes') FROM batches WHERE owner = ?1 AND NOT is_finished
)
"""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits in bytes, of one file and of all that an owner has: files, and results of unfinished batches."""

    max_file_bytes: int = 512 << 20
    max_owner_bytes: int = 10 << 30


class FileTooLarge(Exception):
    """The file exceeds the limit of one file."""


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

    def __init__(self, path: Path, count: Callable[[int], None] = lambda _: None) -> None:
        """Create the file.

        count: called with the number of bytes before each write; raises if they are not allowed.
        """
        self.num_bytes = 0
        self._path: Final = path
        self._count: Final = count
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: Final[BinaryIO] = os.fdopen(descriptor, "wb")

    def write(self, data: bytes | bytearray) -> None:
        """Append.

        Raises:
            FileTooLarge, NoRoomForFile: with the data it is larger than allowed.
            OSError: it cannot be written.
        """
        self._count(len(data))
        self.num_bytes += len(data)
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
        limits: FileLimits,
        clock: Callable[[], float] = time,
    ) -> None:
        """`folder` returns the folder, which exists; it is not called before there is a file."""
        self._database: Final = database
        self._folder: Final = folder
        self._limits: Final = limits
        self._clock: Final = clock
        self._accounts: Final[dict[str, Account]] = {}
        self._charges: Final[dict[Draft, Charge]] = {}

    def path(self, file_id: str) -> Path:
        return self._folder() / file_id

    def account(self, owner: str) -> Account:
        """Return what counts the bytes of an owner."""
        count = partial(self._num_stored, owner)
        return self._accounts.setdefault(owner, Account(self._limits.max_owner_bytes, count))

    def begin(self, owner: str) -> Draft:
        """Create a file that an owner uploads, for `add` or `discard`.

        Raises:
            NoRoomForFile: the owner has as much on the disk as it may.
            OSError: the file cannot be created.
        """
        charge = self.account(owner).open()
        charge.check()

        def count(num_bytes: int) -> None:
            if charge.num_bytes + num_bytes > self._limits.max_file_bytes:
                raise FileTooLarge
            charge.add(num_bytes)

        draft = Draft(self._draft_path(), count)
        self._charges[draft] = charge
        return draft

    def begin_output(self) -> Draft:
        """Create a file for results, which are on their owner's account already, for `end` or `discard`.

        Raises:
            OSError: the file cannot be created.
        """
        return Draft(self._draft_path())

    def end(self, draft: Draft, file_id: str) -> None:
        """Put a file on disk; it is not visible to clients before it is added to the database.

        Raises:
            OSError: the file cannot be written.
        """
        draft.rename(self.path(file_id))

    def add(self, file: StoredFile, draft: Draft) -> None:
        """Put an upload on disk and add it to the database.

        Raises:
            OSError: the file or the database cannot be written.
        """
        self.end(draft, file.id)
        self._charges[draft].store(lambda _: self._insert(file))

    def discard(self, draft: Draft) -> None:
        """Delete a draft; one that has ended stays."""
        draft.close()
        if (charge := self._charges.pop(draft, None)) is not None:
            charge.close()

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
        """Delete the files whose time is over, except for inputs of unfinished batches."""
        with self._database.transaction() as database:
            rows = database.execute(
                "DELETE FROM files WHERE expires <= ? "
                "AND id NOT IN (SELECT input_file_id FROM batches WHERE NOT is_finished) "
                "RETURNING id",
                (self._clock(),),
            ).fetchall()
        for (file_id,) in rows:
            self.path(file_id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete what a server has left that ended while it wrote it; called before files are begun."""
        with self._database.transaction() as database:
            known = {row[0] for row in database.execute("SELECT id FROM files")}
        for path in self._folder().iterdir():
            if path.name not in known:
                path.unlink()

    def _draft_path(self) -> Path:
        return self._folder() / f"{secrets.token_hex(8)}{_DRAFT}"

    def _insert(self, file: StoredFile) -> None:
        with self._database.transaction() as database:
            insert_file(database, file)

    def _num_stored(self, owner: str) -> int:
        """Return the bytes of an owner's files, and of results that are in no file yet."""
        with self._database.transaction() as database:
            num_bytes: int = database.execute(_NUM_BYTES, (owner, _LEAST_BYTES)).fetchone()[0]
        return num_bytes


def insert_file(database: sqlite3.Connection, file: StoredFile) -> None:
    """Add a file within a transaction; one that is there already is replaced."""
    database.execute(
        f"INSERT OR REPLACE INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(file)
    )

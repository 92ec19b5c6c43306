"""The results of a batch while it runs, in a database that its output files replace in the end."""

from collections.abc import Generator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from app.batches.records import Record
from app.storage.disk.database import Database
from app.storage.disk.quota import Charge

_SCHEMA: Final = """
DROP TABLE IF EXISTS results;
DROP TABLE IF EXISTS custom_ids;
DROP TABLE IF EXISTS facts;
CREATE TABLE results (line INTEGER PRIMARY KEY, is_error INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE custom_ids (digest BLOB PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
PRAGMA user_version = 1
"""
# Bytes that a result takes in a file beside its text.
_LINE_END: Final = 1


class Counts(NamedTuple):
    """Lines that have a result."""

    num_completed: int = 0
    num_failed: int = 0


class WorkFile:
    """Stores one result for each line, and the custom ids of the input.

    A result that was put survives a crash of the process or of the machine.
    """

    def __init__(self, path: Path, charge: Charge | None = None) -> None:
        """Open or create it.

        charge: counts the bytes of the results; None if they have no limit.

        Raises:
            OSError: it cannot be read or written; so with all methods.
        """
        self._database: Final = Database(path, _SCHEMA, synchronous="FULL")
        self._charge: Final = charge

    def check_room(self) -> None:
        """Raise NoRoomForFile if there is room for no more results."""
        if self._charge is not None:
            self._charge.check()

    def put(self, records: Sequence[Record]) -> None:
        """Add results in one transaction; a line that has a result keeps it.

        Raises:
            NoRoomForFile: there is no room for all of them; those before are added.
        """
        rows: list[tuple[int, bool, bytes]] = []
        try:
            for record in records:
                if self._charge is not None:
                    self._charge.add(len(record.text) + _LINE_END)
                rows.append((record.number, record.is_error, record.text))
        finally:
            with self._database.transaction() as database:
                database.executemany("INSERT OR IGNORE INTO results VALUES (?, ?, ?)", rows)

    def has(self, number: int) -> bool:
        """Return True if a line has a result."""
        with self._database.transaction() as database:
            query = "SELECT 1 FROM results WHERE line = ?"
            return database.execute(query, (number,)).fetchone() is not None

    def counts(self) -> Counts:
        with self._database.transaction() as database:
            num_all, num_failed = database.execute(
                "SELECT COUNT(*), COALESCE(SUM(is_error), 0) FROM results"
            ).fetchone()
        return Counts(num_all - num_failed, num_failed)

    def num_bytes(self) -> int:
        """Return the size of the results, as lines of a file."""
        with self._database.transaction() as database:
            query = "SELECT COALESCE(SUM(LENGTH(record) + ?), 0) FROM results"
            num_bytes: int = database.execute(query, (_LINE_END,)).fetchone()[0]
        return num_bytes

    def records(self, *, is_error: bool | None = None) -> Generator[bytes]:
        """Yield the results in the order of the lines; only one is in memory at a time.

        is_error: yield only errors or only responses; None is all.
        """
        with self._database.transaction() as database:
            for (record,) in database.execute(
                "SELECT record FROM results WHERE ?1 IS NULL OR is_error = ?1 ORDER BY line",
                (is_error,),
            ):
                yield record

    def repeated(self, custom_ids: Mapping[int, str]) -> dict[int, int]:
        """Add the custom ids of lines; return the lines that repeat one, each with the first line that has it.

        custom_ids: by the number of the line.
        """
        repeated: dict[int, int] = {}
        with self._database.transaction() as database:
            for number, custom_id in custom_ids.items():
                digest = sha256(custom_id.encode(errors="surrogatepass")).digest()
                added = database.execute(
                    "INSERT OR IGNORE INTO custom_ids VALUES (?, ?)", (digest, number)
                )
                if not added.rowcount:
                    query = "SELECT line FROM custom_ids WHERE digest = ?"
                    repeated[number] = database.execute(query, (digest,)).fetchone()[0]
        return repeated

    def fact(self, name: str) -> str | None:
        with self._database.transaction() as database:
            row = database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def set_fact(self, name: str, value: str) -> None:
        with self._database.transaction() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def clear(self) -> None:
        """Forget everything."""
        with self._database.transaction() as database:
            for table in ("results", "custom_ids", "facts"):
                database.execute(f"DELETE FROM {table}")
        if self._charge is not None:
            self._charge.set(0)

    def close(self) -> None:
        self._database.close()
        if self._charge is not None:
            self._charge.close()

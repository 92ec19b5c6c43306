"""The results of a batch while it runs, in a database that its output files replace in the end."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from app.batches.records import Record
from app.storage.database import Database

_SCHEMA: Final = """
DROP TABLE IF EXISTS results;
DROP TABLE IF EXISTS custom_ids;
DROP TABLE IF EXISTS facts;
CREATE TABLE results (line INTEGER PRIMARY KEY, is_error INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE custom_ids (digest BLOB PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
PRAGMA user_version = 1
"""


class Counts(NamedTuple):
    """Lines that have a result."""

    num_completed: int = 0
    num_failed: int = 0


class WorkFile:
    """Stores one result for each line, and the custom ids of the input.

    A result that was put survives a crash of the process or of the machine.
    """

    def __init__(self, path: Path) -> None:
        """Open or create it.

        Raises:
            OSError: it cannot be read or written; so with all methods.
        """
        self._database: Final = Database(path, _SCHEMA, synchronous="FULL")

    def put(self, records: Sequence[Record]) -> None:
        """Add results in one transaction; a line that has a result keeps it."""
        with self._database.transaction() as database:
            database.executemany(
                "INSERT OR IGNORE INTO results VALUES (?, ?, ?)",
                [(r.number, r.is_error, r.text) for r in records],
            )

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

    def records(self, *, is_error: bool | None = None) -> Iterator[bytes]:
        """Yield the results in the order of the lines; only one is in memory at a time.

        is_error: yield only errors or only responses; None is all.
        """
        with self._database.transaction() as database:
            for (record,) in database.execute(
                "SELECT record FROM results WHERE ?1 IS NULL OR is_error = ?1 ORDER BY line",
                (is_error,),
            ):
                yield record

    def repeated(self, custom_ids: Sequence[tuple[str, int]]) -> dict[int, int]:
        """Add the custom ids of lines; return the lines that repeat one, each with the first line that has it."""
        repeated: dict[int, int] = {}
        with self._database.transaction() as database:
            for custom_id, number in custom_ids:
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

    def close(self) -> None:
        self._database.close()

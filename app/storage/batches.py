"""The store of batches and of their statuses."""

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from app.storage.disk.database import Database
from app.storage.files import Page, StoredFile, insert_file

FINAL: Final = frozenset({"completed", "failed", "expired", "cancelled"})

BATCHES_SCHEMA: Final = """
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    is_finished INTEGER NOT NULL,
    input_file_id TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX batches_of_owner ON batches (owner, number);
CREATE INDEX unfinished_batches ON batches (number) WHERE NOT is_finished;
"""

_UNFINISHED: Final = """
SELECT id, owner,
    json_extract(body, '$.status') = 'cancelling' OR json_extract(body, '$.expires') <= ?,
    body
FROM batches WHERE NOT is_finished ORDER BY number
"""


class _Row(NamedTuple):
    """An unfinished batch.

    is_over: whether no more of its lines are to be served, as `StoredBatch.is_over` says.
    """

    id: str
    owner: str
    is_over: int
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """A batch, in OpenAI's terms; times are in seconds since the epoch.

    times: when the batch entered each status.
    output_ttl: seconds for which its output files are kept; None keeps them until they are deleted.
    outcome: the status that it gets when its files are written.
    num_bytes: the size of the results so far, on the account of the owner until they are in files.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created: int
    expires: int
    metadata: Mapping[str, str] | None = None
    status: str = "validating"
    times: Mapping[str, int] = field(default_factory=dict)
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    errors: Sequence[Mapping[str, Any]] = ()
    output_ttl: int | None = None
    outcome: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.status in FINAL

    def is_over(self, now: float) -> bool:
        """Return whether no more lines are served: the batch is cancelled or its window is over."""
        return self.status == "cancelling" or self.expires <= now


# Returns a batch as it is to be, or None to leave it.
Change = Callable[[StoredBatch], StoredBatch | None]


class BatchStore:
    """Stores the batches of each owner, who sees only their own."""

    def __init__(self, database: Database) -> None:
        self._database: Final = database

    def add(self, batch: StoredBatch) -> bool:
        """Add a batch; return False if its owner has no such input file.

        Raises:
            OSError: the database cannot be written.
        """
        with self._database.transaction() as database:
            return bool(
                database.execute(
                    "INSERT INTO batches (id, owner, is_finished, input_file_id, body) "
                    "SELECT ?, ?, ?, id, ? FROM files WHERE id = ? AND owner = ?",
                    (
                        batch.id,
                        batch.owner,
                        batch.is_finished,
                        _to_json(batch),
                        batch.input_file_id,
                        batch.owner,
                    ),
                ).rowcount
            )

    def get(self, owner: str, batch_id: str) -> StoredBatch | None:
        with self._database.transaction() as database:
            row = database.execute(
                "SELECT body FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
            ).fetchone()
        return None if row is None else _from_json(row[0])

    def page(self, owner: str, *, after: str | None, limit: int) -> Page[StoredBatch]:
        """Return an owner's batches, newest first, starting after the batch `after`."""
        with self._database.transaction() as database:
            rows = database.execute(
                "SELECT body FROM batches WHERE owner = ?1 "
                "AND (?2 IS NULL OR number < (SELECT number FROM batches WHERE id = ?2)) "
                "ORDER BY number DESC LIMIT ?3",
                (owner, after, limit + 1),
            ).fetchall()
        return Page.of([_from_json(row[0]) for row in rows], limit)

    def is_input(self, file_id: str) -> bool:
        """Return True if an unfinished batch reads a file."""
        with self._database.transaction() as database:
            return (
                database.execute(
                    "SELECT 1 FROM batches WHERE input_file_id = ? AND NOT is_finished", (file_id,)
                ).fetchone()
                is not None
            )

    def change(
        self, batch_id: str, change: Change, files: Sequence[StoredFile] = ()
    ) -> StoredBatch:
        """Change a batch and add files in the same transaction; return the batch after the change.

        Raises:
            OSError: the database cannot be written.
        """
        with self._database.transaction() as database:
            database.execute("BEGIN IMMEDIATE")
            query = "SELECT body FROM batches WHERE id = ?"
            before = _from_json(database.execute(query, (batch_id,)).fetchone()[0])
            if (after := change(before)) is None:
                return before
            database.execute(
                "UPDATE batches SET body = ?, is_finished = ? WHERE id = ?",
                (_to_json(after), after.is_finished, batch_id),
            )
            for file in files:
                insert_file(database, file)
            return after

    def next_to_run(
        self,
        running: Container[str],
        limit: int,
        *,
        limit_over: int,
        now: float,
        skipped: Container[str] = (),
    ) -> list[StoredBatch]:
        """Return unfinished batches to start, oldest first.

        Owners take turns, so that an owner with few running batches is served first; and one of which none
        runs waits for no other owner: its first batch is returned whatever the limits.

        running: the ids of batches that run already.
        limit: the most batches whose lines are to be served.
        limit_over: the most batches that only have to be finished, which need not wait for others.
        skipped: the ids of batches that are not to run now.

        Raises:
            OSError: the database cannot be read.
        """
        with self._database.transaction() as database:
            rows = [_Row(*row) for row in database.execute(_UNFINISHED, (now,))]
        found: list[StoredBatch] = []
        room = {False: limit, True: limit_over}
        for num_before, row in _in_turns([row for row in rows if row.id not in skipped], running):
            if num_before and room[bool(row.is_over)] <= 0:
                continue
            room[bool(row.is_over)] -= 1
            found.append(_from_json(row.body))
        return found

    def num_unfinished(self, owner: str) -> int:
        with self._database.transaction() as database:
            query = "SELECT COUNT(*) FROM batches WHERE owner = ? AND NOT is_finished"
            count: int = database.execute(query, (owner,)).fetchone()[0]
        return count

    def is_unfinished(self, batch_id: str) -> bool:
        with self._database.transaction() as database:
            query = "SELECT 1 FROM batches WHERE id = ? AND NOT is_finished"
            return database.execute(query, (batch_id,)).fetchone() is not None


def _in_turns(rows: Iterable[_Row], running: Container[str]) -> list[tuple[int, _Row]]:
    """Return those that wait: the first of each owner, then the second, behind those that run.

    Each is returned with how many of its owner are before it.  Batches that are over, and only have to end,
    and those that are not have turns of their own.
    """
    before: Counter[tuple[str, int]] = Counter()
    waiting: list[tuple[int, _Row]] = []
    for row in sorted(rows, key=lambda row: row.id not in running):
        if row.id not in running:
            waiting.append((before[row.owner, row.is_over], row))
        before[row.owner, row.is_over] += 1
    return sorted(waiting, key=lambda pair: pair[0])


def _to_json(batch: StoredBatch) -> str:
    return json.dumps(asdict(batch))


def _from_json(text: str) -> StoredBatch:
    return StoredBatch(**json.loads(text))

"""The store of responses that clients asked to keep (`store`), and of conversations, in SQLite.

Each response of a conversation has all the input before it, but an image of an owner is there once.

Every call blocks for a moment, so call it in a worker thread.
"""

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any, Final

from app.storage.disk.database import Database
from app.storage.responses.conversation_tables import TABLES
from app.storage.responses.conversations import Addition, ConversationStore
from app.storage.responses.limits import StoreLimits

_FILE: Final = "responses.sqlite"

# A database of a version without an upgrade is dropped: responses are stored for some time only.
_SCHEMA_VERSION: Final = 6
_VERSION: Final = f"PRAGMA user_version = {_SCHEMA_VERSION}"
_UPGRADES: Final = {5: f"{TABLES}{_VERSION}"}
_SCHEMA: Final = f"""
DROP TABLE IF EXISTS conversation_items;
DROP TABLE IF EXISTS conversations;
DROP TABLE IF EXISTS image_uses;
DROP TABLE IF EXISTS images;
DROP TABLE IF EXISTS items;
DROP TABLE IF EXISTS responses;
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    is_finished INTEGER NOT NULL,
    body TEXT NOT NULL,
    input TEXT NOT NULL,
    events BLOB
);
CREATE INDEX responses_by_age ON responses (owner, created, num_bytes, id);
CREATE INDEX responses_by_time ON responses (created);
CREATE TABLE items (
    id TEXT PRIMARY KEY,
    response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    body TEXT NOT NULL
);
CREATE INDEX items_of_response ON items (response_id);
CREATE TABLE images (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    digest TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    url TEXT NOT NULL,
    UNIQUE (owner, digest)
);
CREATE TABLE image_uses (
    response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    image INTEGER NOT NULL REFERENCES images (number),
    PRIMARY KEY (response_id, image)
) WITHOUT ROWID;
CREATE INDEX uses_of_image ON image_uses (image);
CREATE TRIGGER image_unused AFTER DELETE ON image_uses
WHEN NOT EXISTS (SELECT 1 FROM image_uses WHERE image = OLD.image)
BEGIN
    DELETE FROM images WHERE number = OLD.image;
END;
{TABLES}{_VERSION}
"""

# The newest response stays, however large it is.  An image counts with the newest one that has it.
_DROP_OLDEST: Final = """
WITH newest AS (
    SELECT id, num_bytes, ROW_NUMBER() OVER (ORDER BY created DESC, rowid DESC) AS position
    FROM responses WHERE owner = ?
), counted AS (
    SELECT id, position, num_bytes FROM newest
    UNION ALL
    SELECT NULL, MIN(position), images.num_bytes
    FROM newest JOIN image_uses ON response_id = id JOIN images ON number = image
    GROUP BY image
), totals AS (
    SELECT MAX(id) AS id, position, SUM(SUM(num_bytes)) OVER (ORDER BY position) AS total
    FROM counted GROUP BY position
)
DELETE FROM responses WHERE id IN (
    SELECT id FROM totals WHERE position > ? OR total > ? AND position > 1
)
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON; an unfinished one is being generated, or its server has crashed.

    input: the list of items that it responds to.
    output: its output items by id, which `body` contains as well.
    images: the URLs of images that `input` names, by their SHA-256 in hexadecimal.
    events: the events of its stream, compressed, if clients may ask for them again.
    addition: what it adds to a conversation, in the same transaction.
    """

    body: str
    input: str
    is_finished: bool
    output: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    events: bytes | None = None
    addition: Addition | None = None

    @property
    def num_bytes(self) -> int:
        """The size of all but the images."""
        texts = (self.body, self.input, *self.output.values())
        return sum(len(text.encode()) for text in texts) + len(self.events or b"")


_DEFAULT_LIMITS: Final = StoreLimits()


class ResponseStore:
    """Stores the latest responses of each owner for some time.

    An owner sees only their own responses.

    conversations: those of each owner.
    """

    def __init__(
        self,
        limits: StoreLimits = _DEFAULT_LIMITS,
        folder: Path | None = None,
        clock: Callable[[], float] = time,
    ) -> None:
        """Open the database in an existing folder; None is a database in memory.

        Raises:
            OSError: the database cannot be read or written.
        """
        self._limits: Final = limits
        self._clock: Final = clock
        path = None if folder is None else folder / _FILE
        self._database: Final = Database(path, _SCHEMA, upgrades=_UPGRADES)
        self.conversations: Final = ConversationStore(self._database, limits, clock)

    def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Add or replace a response, and drop those that are too old or too many.

        Raises:
            OSError: the database cannot be written.
        """
        now = self._clock()
        with self._database.transaction() as database:
            database.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE "
                "SET body = excluded.body, num_bytes = excluded.num_bytes, "
                "is_finished = excluded.is_finished, events = excluded.events",
                (
                    response_id,
                    owner,
                    now,
                    response.num_bytes,
                    response.is_finished,
                    response.body,
                    response.input,
                    response.events,
                ),
            )
            _put_items(database, response_id, response)
            _put_images(database, owner, response_id, response)
            if response.addition is not None:
                self.conversations.finish_in(database, response.addition)
            self._drop_old(database, owner, now)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, without the items of its output and its events."""
        with self._database.transaction() as database:
            row = self._find(
                database,
                "SELECT body, input, is_finished FROM responses "
                "WHERE id = ? AND owner = ? AND created >= ?",
                response_id,
                owner,
            )
            if row is None:
                return None
            images = database.execute(
                "SELECT digest, url FROM image_uses JOIN images ON number = image "
                "WHERE response_id = ?",
                (response_id,),
            )
            return StoredResponse(row[0], row[1], bool(row[2]), images=dict(images))

    def events(self, owner: str, response_id: str) -> bytes | None:
        """Return the events of a response; None if it has none."""
        with self._database.transaction() as database:
            row = self._find(
                database,
                "SELECT events FROM responses WHERE id = ? AND owner = ? AND created >= ?",
                response_id,
                owner,
            )
        return None if row is None else row[0]

    def item(self, owner: str, item_id: str) -> str | None:
        """Return an item of the output of a response."""
        with self._database.transaction() as database:
            row = self._find(
                database,
                "SELECT items.body FROM items JOIN responses ON responses.id = response_id "
                "WHERE items.id = ? AND owner = ? AND created >= ?",
                item_id,
                owner,
            )
        return None if row is None else row[0]

    def delete(self, owner: str, response_id: str) -> None:
        with self._database.transaction() as database:
            database.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            )

    def close(self) -> None:
        self._database.close()

    def _drop_old(self, database: sqlite3.Connection, owner: str, now: float) -> None:
        limits = self._limits
        database.execute("DELETE FROM responses WHERE created < ?", (now - limits.max_age,))
        database.execute(_DROP_OLDEST, (owner, limits.max_responses, limits.max_bytes))
        self.conversations.drop_old(database, owner)

    def _find(
        self, database: sqlite3.Connection, query: str, key: str, owner: str
    ) -> tuple[Any, ...] | None:
        oldest = self._clock() - self._limits.max_age
        row: tuple[Any, ...] | None = database.execute(query, (key, owner, oldest)).fetchone()
        return row


def _put_items(database: sqlite3.Connection, response_id: str, response: StoredResponse) -> None:
    database.executemany(
        "INSERT OR REPLACE INTO items VALUES (?, ?, ?)",
        [(item_id, response_id, item) for item_id, item in response.output.items()],
    )


def _put_images(
    database: sqlite3.Connection, owner: str, response_id: str, response: StoredResponse
) -> None:
    for digest, url in response.images.items():
        database.execute(
            "INSERT OR IGNORE INTO images (owner, digest, num_bytes, url) VALUES (?, ?, ?, ?)",
            (owner, digest, len(url.encode()), url),
        )
        database.execute(
            "INSERT OR IGNORE INTO image_uses "
            "SELECT ?, number FROM images WHERE owner = ? AND digest = ?",
            (response_id, owner, digest),
        )

"""Conversations: lists of items that clients and responses add to, in the database of the stored responses.

A response that goes on from a conversation has its turn: until it ends, neither another response nor a client changes
the items.

Every call blocks for a moment, so call it in a worker thread.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

from app.storage.disk.database import Database
from app.storage.responses.conversation_tables import (
    ConversationMissing,
    Items,
    ItemsRefused,
    StoredConversation,
    find,
    find_item,
)
from app.storage.responses.conversation_turns import ConversationTurn, ConversationTurns
from app.storage.responses.limits import StoreLimits

# As many as a request may have.
MAX_ITEMS: Final = 8192

# The one that was used last stays, however large it is.
_UNUSED: Final = """
WITH latest AS (
    SELECT id, ROW_NUMBER() OVER latest_first AS position, SUM(num_bytes) OVER latest_first AS total
    FROM conversations WHERE owner = ? WINDOW latest_first AS (ORDER BY used DESC, rowid DESC)
)
SELECT id FROM latest WHERE position > ? OR total > ? AND position > 1
"""
_FORWARDS: Final = "number > ? ORDER BY number"
_BACKWARDS: Final = "number < ? ORDER BY number DESC"
_LAST: Final = 2**63 - 1
_PIECE_CHARACTERS: Final = 1 << 20


class ItemPage(NamedTuple):
    items: Sequence[str]
    has_more: bool


class Addition(NamedTuple):
    """What a response adds in its turn, which ends; no items if it has failed."""

    turn: ConversationTurn
    items: Items


class ConversationStore:
    """Stores the conversations of each owner, who sees no others.

    Those that were used last are kept, for some time after that.

    turns: the responses that go on from them.
    """

    def __init__(self, database: Database, limits: StoreLimits, clock: Callable[[], float]) -> None:
        self._database: Final = database
        self._limits: Final = limits
        self._clock: Final = clock
        self.turns: Final = ConversationTurns()

    def create(
        self, owner: str, conversation_id: str, metadata: str, items: Items
    ) -> StoredConversation:
        """Add a conversation, and drop those that are too old or too many.

        Raises:
            ItemsRefused: see `add`.
            OSError: the database cannot be written; so do all that write.
        """
        now = self._clock()
        with self._database.transaction() as database:
            database.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)",
                (conversation_id, owner, int(now), now, len(metadata.encode()), metadata),
            )
            self._add(database, owner, conversation_id, items)
        return StoredConversation(conversation_id, int(now), metadata)

    def get(self, owner: str, conversation_id: str) -> StoredConversation:
        """Return a conversation.

        Raises:
            ConversationMissing: the owner has none with this id; so do all that take an id.
        """
        with self._found(owner, conversation_id) as (_, conversation):
            return conversation

    def update(self, owner: str, conversation_id: str, metadata: str) -> StoredConversation:
        """Replace the metadata."""
        with self._found(owner, conversation_id) as (database, conversation):
            grown = len(metadata.encode()) - len(conversation.metadata.encode())
            database.execute(
                "UPDATE conversations SET metadata = ? WHERE id = ?", (metadata, conversation_id)
            )
            self._use(database, conversation_id, grown)
        return StoredConversation(conversation_id, conversation.created, metadata)

    def delete(self, owner: str, conversation_id: str) -> None:
        """Delete a conversation with its items, even during a turn, which then adds to nothing."""
        with self._found(owner, conversation_id) as (database, _):
            database.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

    def add(self, owner: str, conversation_id: str, items: Items) -> None:
        """Add items at the end.

        Raises:
            ItemsRefused: there are too many, or one has the id of another.
            ConversationBusy: a response has its turn.
        """
        with self._found(owner, conversation_id, to_change=True) as (database, _):
            self._add(database, owner, conversation_id, items)

    def delete_item(self, owner: str, conversation_id: str, item_id: str) -> StoredConversation:
        """Delete an item, and return the conversation.

        Raises:
            ItemMissing: there is no such item.
            ConversationBusy: a response has its turn.
        """
        with self._found(owner, conversation_id, to_change=True) as (database, conversation):
            number, body = find_item(database, conversation_id, item_id)
            database.execute("DELETE FROM conversation_items WHERE number = ?", (number,))
            self._use(database, conversation_id, -len(body.encode()))
            return conversation

    def item(self, owner: str, conversation_id: str, item_id: str) -> str:
        """Return an item.

        Raises:
            ItemMissing: there is no such item.
        """
        with self._found(owner, conversation_id) as (database, _):
            return find_item(database, conversation_id, item_id)[1]

    def page(
        self,
        owner: str,
        conversation_id: str,
        *,
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
    ) -> ItemPage:
        """Return items that follow one in an order.

        Raises:
            ItemMissing: `after` is the id of none.
        """
        start, where = (0, _FORWARDS) if order == "asc" else (_LAST, _BACKWARDS)
        with self._found(owner, conversation_id) as (database, _):
            if after is not None:
                start, _ = find_item(database, conversation_id, after)
            rows = database.execute(
                f"SELECT body FROM conversation_items WHERE conversation_id = ? AND {where} LIMIT ?",
                (conversation_id, start, limit + 1),
            ).fetchall()
        return ItemPage([body for (body,) in rows[:limit]], len(rows) > limit)

    def backwards(self, owner: str, conversation_id: str) -> Iterator[tuple[str, str]]:
        """Yield the ids and the JSON of the items, the last one first, a few of them in memory at a time."""
        start = _LAST
        while rows := self._piece(owner, conversation_id, start):
            for number, item_id, body in rows:
                yield item_id, body
                start = number

    def _piece(self, owner: str, conversation_id: str, start: int) -> list[tuple[int, str, str]]:
        rows, size = [], 0
        with self._found(owner, conversation_id) as (database, _):
            for row in database.execute(
                "SELECT number, id, body FROM conversation_items "
                f"WHERE conversation_id = ? AND {_BACKWARDS}",
                (conversation_id, start),
            ):
                rows.append(row)
                if (size := size + len(row[-1])) > _PIECE_CHARACTERS:
                    break
        return rows

    def use(self, turn: ConversationTurn) -> None:
        """Begin the time for which a conversation is kept again, which shows also that the disk is not full.

        Raises:
            ItemsRefused: it has so many bytes that no more can be added.
        """
        with self._found(turn.owner, turn.conversation_id) as (database, _):
            self._check_size(database, turn.conversation_id)
            self._use(database, turn.conversation_id, 0)

    def finish(self, addition: Addition) -> None:
        """Add the items of a turn to what is left of its conversation, and end it."""
        with self._database.transaction() as database:
            self.finish_in(database, addition)
            self.drop_old(database, addition.turn.owner)

    def finish_in(self, database: sqlite3.Connection, addition: Addition) -> None:
        """Do what `finish` does within a transaction, but for what is dropped; the next turn sees all of it."""
        turn, items = addition
        if find(database, turn.owner, turn.conversation_id, self._oldest()) is not None:
            self._insert(database, turn.conversation_id, items)
        turn.close()

    def drop_old(self, database: sqlite3.Connection, owner: str) -> None:
        """Drop conversations that are too old, and those of an owner that are too many and without a turn."""
        limits = self._limits
        database.execute("DELETE FROM conversations WHERE used < ?", (self._oldest(),))
        unused = database.execute(
            _UNUSED, (owner, limits.max_responses, limits.max_bytes)
        ).fetchall()
        database.executemany(
            "DELETE FROM conversations WHERE id = ?",
            [row for row in unused if not self.turns.is_taken(owner, *row)],
        )

    def _add(
        self, database: sqlite3.Connection, owner: str, conversation_id: str, items: Items
    ) -> None:
        known = {
            item_id
            for (item_id,) in database.execute(
                "SELECT id FROM conversation_items WHERE conversation_id = ?", (conversation_id,)
            )
        }
        if len(known) + len(items) > MAX_ITEMS:
            raise ItemsRefused(f"a conversation has at most {MAX_ITEMS} items")
        for index, item_id in enumerate(items):
            if item_id in known:
                raise ItemsRefused("the conversation has an item with this id", index)
        self._insert(database, conversation_id, items)
        self._check_size(database, conversation_id)
        self.drop_old(database, owner)

    def _check_size(self, database: sqlite3.Connection, conversation_id: str) -> None:
        (num_bytes,) = database.execute(
            "SELECT num_bytes FROM conversations WHERE id = ?", (conversation_id,)
        ).fetchone()
        if num_bytes > (limit := self._limits.max_bytes):
            message = f"a conversation has at most {limit} bytes (MLX_SERVER_MAX_STORED_MIB)"
            raise ItemsRefused(message)

    def _insert(self, database: sqlite3.Connection, conversation_id: str, items: Items) -> None:
        database.executemany(
            "INSERT INTO conversation_items (conversation_id, id, body) VALUES (?, ?, ?)",
            [(conversation_id, item_id, body) for item_id, body in items.items()],
        )
        grown = sum(len(body.encode()) for body in items.values())
        self._use(database, conversation_id, grown)

    def _use(self, database: sqlite3.Connection, conversation_id: str, grown: int) -> None:
        database.execute(
            "UPDATE conversations SET used = ?, num_bytes = num_bytes + ? WHERE id = ?",
            (self._clock(), grown, conversation_id),
        )

    @contextmanager
    def _found(
        self, owner: str, conversation_id: str, *, to_change: bool = False
    ) -> Iterator[tuple[sqlite3.Connection, StoredConversation]]:
        with self._database.transaction() as database:
            conversation = find(database, owner, conversation_id, self._oldest())
            if conversation is None:
                raise ConversationMissing
            if to_change:
                self.turns.check_free(owner, conversation_id)
            yield database, conversation

    def _oldest(self) -> float:
        return self._clock() - self._limits.max_age

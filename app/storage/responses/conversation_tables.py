"""The tables of conversations, and what is found in them."""

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# The entries of an index end with the rowid, here the number, so that items come out in their order.
TABLES: Final = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created INTEGER NOT NULL,
    used REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    metadata TEXT NOT NULL
);
CREATE INDEX conversations_by_use ON conversations (owner, used, num_bytes, id);
CREATE INDEX conversations_by_time ON conversations (used);
CREATE TABLE conversation_items (
    number INTEGER PRIMARY KEY,
    conversation_id TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (conversation_id, id)
);
CREATE INDEX items_of_conversation ON conversation_items (conversation_id);
"""

# The JSON of items by their ids, in their order.
Items = Mapping[str, str]


class ConversationMissing(LookupError):
    """The owner has no conversation with this id."""


class ItemMissing(LookupError):
    """The conversation has no item with this id."""


class ItemsRefused(ValueError):
    """The items cannot be added; the message says why.

    index: of the one at fault; None if it is all of them.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation without its items.

    created: in seconds since the epoch.
    metadata: as JSON.
    """

    id: str
    created: int
    metadata: str


def find(
    database: sqlite3.Connection, owner: str, conversation_id: str, oldest: float
) -> StoredConversation | None:
    """Return a conversation of an owner that was used since a time in seconds, or None."""
    row = database.execute(
        "SELECT id, created, metadata FROM conversations WHERE id = ? AND owner = ? AND used >= ?",
        (conversation_id, owner, oldest),
    ).fetchone()
    return None if row is None else StoredConversation(*row)


def find_item(database: sqlite3.Connection, conversation_id: str, item_id: str) -> tuple[int, str]:
    """Return the number and the JSON of an item.

    Raises:
        ItemMissing: there is no such item.
    """
    row: tuple[int, str] | None = database.execute(
        "SELECT number, body FROM conversation_items WHERE conversation_id = ? AND id = ?",
        (conversation_id, item_id),
    ).fetchone()
    if row is None:
        raise ItemMissing(item_id)
    return row

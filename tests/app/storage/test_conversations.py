"""Stored conversations: whose they are, how many, for how long, and whose turn it is."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from signal import SIGKILL
from typing import Any, Final

import pytest

from app.storage.disk.database import StorageError
from app.storage.responses.conversation_tables import ConversationMissing, ItemMissing, ItemsRefused
from app.storage.responses.conversation_turns import ConversationBusy
from app.storage.responses.conversations import MAX_ITEMS, Addition, ConversationStore
from app.storage.responses.limits import StoreLimits
from app.storage.responses.store import ResponseStore, StoredResponse
from tests.support.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def responses(tmp_path: Path, clock: FakeClock) -> Iterator[ResponseStore]:
    with closing(ResponseStore(StoreLimits(3, 60), tmp_path, clock)) as made:
        yield made


@pytest.fixture
def store(responses: ResponseStore) -> ConversationStore:
    return responses.conversations


def named(*ids: str, size: int = 1) -> Mapping[str, str]:
    return {item_id: item_id * size for item_id in ids}


def bodies(store: ConversationStore, conversation_id: str) -> list[str]:
    return [body for _, body in store.backwards("me", conversation_id)][::-1]


def has(store: ConversationStore, conversation_id: str) -> bool:
    try:
        store.get("me", conversation_id)
    except ConversationMissing:
        return False
    return True


def response(addition: Addition | None = None, body: str = "{}") -> StoredResponse:
    return StoredResponse(body, "[]", True, addition=addition)


def test_a_conversation_is_its_owners(store: ConversationStore) -> None:
    made = store.create("me", "c", '{"k": "v"}', named("a"))
    assert (made.id, made.created, made.metadata) == ("c", 1000, '{"k": "v"}')
    assert store.get("me", "c") == made
    calls: list[Any] = [
        lambda: store.get("you", "c"),
        lambda: store.update("you", "c", "{}"),
        lambda: store.delete("you", "c"),
        lambda: store.add("you", "c", named("b")),
        lambda: store.item("you", "c", "a"),
        lambda: store.delete_item("you", "c", "a"),
        lambda: [*store.backwards("you", "c")],
        lambda: store.use(store.turns.take("you", "c")),
        lambda: store.get("me", "other"),
    ]
    for call in calls:
        with pytest.raises(ConversationMissing):
            call()
    assert store.update("me", "c", "{}").metadata == store.get("me", "c").metadata == "{}"


def test_items_are_in_their_order(store: ConversationStore) -> None:
    store.create("me", "c", "{}", named("b", "a"))
    store.create("me", "other", "{}", named("a", "z"))
    store.add("me", "c", named("d", "c"))
    assert bodies(store, "c") == ["b", "a", "d", "c"]
    assert store.item("me", "c", "d") == "d"
    assert store.delete_item("me", "c", "d") == store.get("me", "c")
    for take in (store.item, store.delete_item):
        with pytest.raises(ItemMissing, match="d"):
            take("me", "c", "d")
    assert bodies(store, "c") == ["b", "a", "c"]
    assert bodies(store, "other") == ["a", "z"]


def test_pages_follow_an_item(store: ConversationStore) -> None:
    store.create("me", "c", "{}", named("a", "b", "c"))
    assert store.page("me", "c", after=None, limit=2, order="asc") == (["a", "b"], True)
    assert store.page("me", "c", after="b", limit=2, order="asc") == (["c"], False)
    assert store.page("me", "c", after=None, limit=3, order="desc") == (["c", "b", "a"], False)
    assert store.page("me", "c", after="c", limit=1, order="desc") == (["b"], True)
    with pytest.raises(ItemMissing):
        store.page("me", "c", after="d", limit=1, order="asc")


def test_items_are_read_backwards_a_few_at_a_time(store: ConversationStore) -> None:
    items = named(*"abcdef", size=600_000)
    store.create("me", "c", "{}", items)
    reading = store.backwards("me", "c")
    assert next(reading) == ("f", items["f"])
    store.delete_item("me", "c", "b")
    assert [item_id for item_id, _ in reading] == ["e", "d", "c", "a"]


def test_items_that_cannot_be_added_change_nothing(store: ConversationStore) -> None:
    with pytest.raises(ItemsRefused, match=f"at most {MAX_ITEMS} items"):
        store.create("me", "large", "{}", {str(number): "" for number in range(MAX_ITEMS + 1)})
    assert not has(store, "large")
    store.create("me", "c", "{}", named("a"))
    with pytest.raises(ItemsRefused, match="an item with this id"):
        store.add("me", "c", named("b", "a"))
    assert bodies(store, "c") == ["a"]


def test_a_conversation_has_so_many_bytes_at_most() -> None:
    with closing(ResponseStore(StoreLimits(max_bytes=100))) as responses:
        store = responses.conversations
        store.create("me", "c", "{}", named("a", size=40))
        store.add("me", "c", named("é", size=29))
        with pytest.raises(ItemsRefused, match="at most 100 bytes"):
            store.add("me", "c", named("b"))
        store.delete_item("me", "c", "a")
        store.add("me", "c", named("b", size=40))
        store.update("me", "c", "{ }")
        with pytest.raises(ItemsRefused):
            store.add("me", "c", {"empty": ""})


def test_those_that_were_used_last_are_kept(store: ConversationStore, clock: FakeClock) -> None:
    store.create("you", "yours", "{}", {})
    for name in "abc":
        store.create("me", name, "{}", {})
        clock.now += 1
    store.add("me", "a", named("x"))
    store.create("me", "d", "{}", {})
    assert [name for name in "abcd" if has(store, name)] == ["a", "c", "d"]
    assert store.get("you", "yours")


def test_one_that_has_a_turn_is_kept(store: ConversationStore, clock: FakeClock) -> None:
    store.create("me", "a", "{}", {})
    turn = store.turns.take("me", "a")
    store.turns.take("you", "b")
    for name in "bcde":
        clock.now += 1
        store.create("me", name, "{}", {})
    assert [name for name in "abcde" if has(store, name)] == ["a", "c", "d", "e"]
    store.finish(Addition(turn, named("x")))
    assert [name for name in "abcde" if has(store, name)] == ["a", "d", "e"]
    assert bodies(store, "a") == ["x"]


def test_the_bytes_of_an_owner_are_bounded_but_for_the_one_used_last() -> None:
    with closing(ResponseStore(StoreLimits(max_bytes=100))) as responses:
        store = responses.conversations
        for name in "abc":
            store.create("me", name, "{}", named(name, size=40))
        assert [name for name in "abc" if has(store, name)] == ["b", "c"]
        store.finish(Addition(store.turns.take("me", "b"), named("x", size=200)))
        assert [name for name in "abc" if has(store, name)] == ["b"]


def test_a_conversation_is_gone_some_time_after_its_last_use(
    responses: ResponseStore, store: ConversationStore, clock: FakeClock, tmp_path: Path
) -> None:
    for name in ("old", "used"):
        store.create("me", name, "{}", named("a"))
    clock.now += 50
    store.use(store.turns.take("me", "used"))
    clock.now += 11
    assert not has(store, "old")
    assert bodies(store, "used") == ["a"]
    responses.put("me", "r", response())
    with closing(sqlite3.connect(tmp_path / "responses.sqlite")) as other:
        assert list(other.execute("SELECT id FROM conversations")) == [("used",)]
        assert list(other.execute("SELECT COUNT(*) FROM conversation_items")) == [(1,)]


# Turns


def test_during_a_turn_nothing_else_changes_the_items(store: ConversationStore) -> None:
    store.create("me", "c", "{}", named("a"))
    turn = store.turns.take("me", "c")
    calls: list[Any] = [
        lambda: store.turns.take("me", "c"),
        lambda: store.add("me", "c", named("b")),
        lambda: store.delete_item("me", "c", "a"),
    ]
    for call in calls:
        with pytest.raises(ConversationBusy):
            call()
    store.turns.take("you", "c").close()
    store.update("me", "c", '{"a": "b"}')
    assert bodies(store, "c") == ["a"]
    turn.close()
    after = store.turns.take("me", "c")
    turn.close()
    with pytest.raises(ConversationBusy):
        store.turns.take("me", "c")
    after.close()


def test_a_response_is_stored_with_what_it_adds_or_not_at_all(
    responses: ResponseStore, store: ConversationStore, tmp_path: Path
) -> None:
    store.create("me", "c", "{}", named("a"))
    turn = store.turns.take("me", "c")
    responses.put("me", "r", response(Addition(turn, named("b"))))
    assert bodies(store, "c") == ["a", "b"]
    turn = store.turns.take("me", "c")
    with closing(sqlite3.connect(tmp_path / "responses.sqlite")) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON conversation_items "
            "BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
        )
    with pytest.raises(StorageError, match="the disk is full"):
        responses.put("me", "s", response(Addition(turn, named("c"))))
    assert responses.get("me", "s") is None
    assert bodies(store, "c") == ["a", "b"]


_KILLED: Final = """
import os, signal, sys
from pathlib import Path
from app.storage.responses.conversations import Addition, ConversationStore
from app.storage.responses.store import ResponseStore, StoredResponse

class Killed(ConversationStore):
    def finish_in(self, database, addition):
        super().finish_in(database, addition)
        os.kill(os.getpid(), signal.SIGKILL)

responses = ResponseStore(folder=Path(sys.argv[1]))
store = responses.conversations
store.create("me", "c", "{}", {"a": "a"})
store.__class__ = Killed
addition = Addition(store.turns.take("me", "c"), {"b": "b"})
responses.put("me", "r", StoredResponse("{}", "[]", True, addition=addition))
"""


def test_a_kill_before_the_commit_leaves_neither(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert done.returncode == -SIGKILL
    with closing(ResponseStore(folder=tmp_path)) as responses:
        assert responses.get("me", "r") is None
        assert [*responses.conversations.backwards("me", "c")] == [("a", "a")]
        responses.conversations.turns.take("me", "c").close()


def test_a_conversation_that_is_deleted_meanwhile_gets_nothing(
    responses: ResponseStore, store: ConversationStore
) -> None:
    store.create("me", "c", "{}", named("a"))
    turn = store.turns.take("me", "c")
    store.delete("me", "c")
    responses.put("me", "r", response(Addition(turn, named("b"))))
    assert responses.get("me", "r") is not None
    assert not has(store, "c")
    store.turns.take("me", "c").close()


def test_a_conversation_that_is_too_large_has_no_further_turn() -> None:
    """What a response adds has been generated, so it is counted before the next one."""
    with closing(ResponseStore(StoreLimits(max_bytes=10))) as responses:
        store = responses.conversations
        store.create("me", "c", "{}", named("a"))
        turn = store.turns.take("me", "c")
        store.use(turn)
        store.finish(Addition(turn, named("b", size=11)))
        with pytest.raises(ItemsRefused, match="at most 10 bytes"):
            store.use(store.turns.take("me", "c"))


# Versions

_VERSION_5: Final = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, num_bytes INTEGER NOT NULL,
    is_finished INTEGER NOT NULL, body TEXT NOT NULL, input TEXT NOT NULL, events BLOB
);
CREATE TABLE items (
    id TEXT PRIMARY KEY, response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    body TEXT NOT NULL
);
CREATE TABLE images (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, digest TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, url TEXT NOT NULL, UNIQUE (owner, digest)
);
CREATE TABLE image_uses (
    response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    image INTEGER NOT NULL REFERENCES images (number), PRIMARY KEY (response_id, image)
) WITHOUT ROWID;
INSERT INTO responses VALUES ('r', 'me', 1000, 2, 1, 'old', '[]', NULL);
PRAGMA user_version = 5;
"""


def test_what_was_stored_before_there_were_conversations_stays(
    tmp_path: Path, clock: FakeClock
) -> None:
    with closing(sqlite3.connect(tmp_path / "responses.sqlite")) as before:
        before.executescript(_VERSION_5)
    for _ in range(2):
        with closing(ResponseStore(folder=tmp_path, clock=clock)) as store:
            assert store.get("me", "r") == StoredResponse("old", "[]", True)
            store.conversations.create("me", f"c{clock.now}", "{}", named("a"))
            found = store.conversations.backwards("me", "c1000.0")
            assert [*found] == [("a", "a")]
        clock.now += 1

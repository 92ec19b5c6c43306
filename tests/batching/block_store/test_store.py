"""The store of a server: its models share a folder, a thread that writes, and their limits."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batching.block_store.folder import is_unused
from batching.block_store.keys import Fetch
from batching.block_store.store import BlockStore, shared_store
from batching.engine.load_slices import LoadCancelled
from tests.support.stored_entries import IDENTITY, MUCH, OTHER, entry_of, is_same, size_of_file


def opened(folder: Path, identity: str = IDENTITY, **limits: Any) -> BlockStore:
    given = {"max_bytes": MUCH, "max_written_a_day": None, **limits}
    return shared_store(folder, identity=identity, **given)


def threads() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("kv-store"))


def test_what_one_life_writes_the_next_one_reads(tmp_path: Path) -> None:
    store, entries = opened(tmp_path / "store"), [entry_of(i) for i in range(3)]
    assert not store.has(entries[0].key)
    assert [store.put(each) for each in entries] == [True] * 3
    store.close()
    assert threads() == []
    again = opened(tmp_path / "store")
    keys = [each.key for each in entries]
    assert all(map(again.has, keys))
    assert (again.num_entries, again.num_bytes) == (3, 3 * size_of_file())
    assert again.size_of(keys[0]) == size_of_file()
    done = threading.Semaphore(0)
    again.call_when_read(done.release)
    again.fetch(keys)
    for _ in keys:
        assert done.acquire(timeout=60)
    assert [again.state_of(key) for key in keys] == [Fetch.READY] * 3
    again.claim(keys[:2])
    assert is_same(again.take(keys[0]), entries[0])
    again.drop_claimed()
    with pytest.raises(KeyError):
        again.take(keys[1])
    again.drop(keys[2:])
    assert again.state_of(keys[2]) is Fetch.UNASKED
    assert again.stats.num_read == 3
    again.close()


def test_a_store_with_an_entry_of_another_form_gives_nothing_from_before(tmp_path: Path) -> None:
    store, entries = opened(tmp_path), [entry_of(i) for i in range(3)]
    for each in entries[:2]:
        store.put(each)
    store.close()
    again = opened(tmp_path)
    again.distrust(entries[0].key)
    again.distrust(entries[0].key)
    assert (again.num_entries, again.num_bytes) == (0, 0)
    assert len([*tmp_path.rglob("*.block")]) == 1
    again.put(entries[2])
    assert again.flush(60)
    assert again.has(entries[2].key)
    again.close()


def test_models_of_a_process_share_one_writer(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path / "." / "", OTHER)
    assert threads() == ["kv-store-reader", "kv-store-reader", "kv-store-writer"]
    one.close()
    assert threads() == ["kv-store-reader", "kv-store-writer"]
    other.put(entry_of(1))
    other.close()
    assert threads() == []
    # Nor does one see what is of the other.
    again = opened(tmp_path)
    assert (again.num_entries, threads()) == (0, ["kv-store-reader", "kv-store-writer"])
    again.close()
    again = opened(tmp_path, OTHER)
    assert again.num_entries == 1
    again.close()


def test_folders_have_stores_of_their_own(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "one"), opened(tmp_path / "other")
    one.put(entry_of(1))
    one.close()
    other.close()
    assert [*(tmp_path / "other").rglob("*.block")] == []
    assert threads() == []


def test_the_limit_of_a_day_is_that_of_all_models(tmp_path: Path) -> None:
    one = opened(tmp_path, max_written_a_day=size_of_file() + 59)
    other = opened(tmp_path, OTHER)
    one.put(entry_of(1))
    other.put(entry_of(2))
    one.close()
    other.close()
    assert len([*tmp_path.rglob("*.block")]) == 1


def test_a_model_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / OTHER).touch()
    with pytest.raises(FileExistsError):
        opened(tmp_path, OTHER)
    assert threads() == []
    one = opened(tmp_path)
    with pytest.raises(FileExistsError):
        opened(tmp_path, OTHER)
    one.close()
    assert threads() == []


def test_a_folder_that_others_can_write_to_is_not_opened(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError):
        opened(tmp_path)
    assert threads() == []
    tmp_path.chmod(0o700)
    opened(tmp_path).close()


def test_a_load_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    def cancelled(_: Callable[[], None]) -> None:
        raise LoadCancelled

    with pytest.raises(LoadCancelled):
        shared_store(tmp_path, MUCH, None, IDENTITY, in_thread=cancelled)
    assert is_unused(tmp_path / IDENTITY)
    shared_store(tmp_path, MUCH, None, IDENTITY).close()

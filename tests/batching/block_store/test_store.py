"""The store of a server: its models share a folder, a thread that writes, and their limits."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from batching.block_store.folder import is_unused, part_of
from batching.block_store.keys import Fetch, Key
from batching.block_store.model_note import read_note
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


def test_two_loads_of_a_model_see_what_the_other_one_writes(tmp_path: Path) -> None:
    """As with the same weights under two ids."""
    one, other = opened(tmp_path, model_id="one"), opened(tmp_path, model_id="other")
    for store, seed in ((one, 1), (other, 2)):
        store.put(entry_of(seed))
        assert store.flush(60)
    for store in (one, other):
        assert all(store.has(entry_of(seed).key) for seed in (1, 2))
        assert (store.num_entries, store.num_bytes) == (2, 2 * size_of_file())
    assert read_note(tmp_path / IDENTITY).model == "other"
    one.close()
    assert not is_unused(tmp_path / IDENTITY)
    other.put(entry_of(3))
    other.close()
    assert is_unused(tmp_path / IDENTITY)
    assert threads() == []
    again = opened(tmp_path)
    assert again.num_entries == 3
    again.close()


def test_what_one_load_of_a_model_deletes_is_gone_for_the_other(tmp_path: Path) -> None:
    limit = 2 * size_of_file()
    one, other = opened(tmp_path, max_bytes=limit), opened(tmp_path)
    one.put(entry_of(1))
    one.put(entry_of(2))
    assert one.flush(60)
    os.utime(next(tmp_path.rglob(entry_of(1).key.name)), (1, 1))
    opened(tmp_path).close()
    # It is still in use, and no stranger's.
    one.put(entry_of(3))
    assert one.flush(60)
    for store in (one, other):
        assert [store.has(entry_of(seed).key) for seed in (1, 2, 3)] == [False, True, True]
        store.close()


def test_a_second_load_takes_away_no_file_that_is_being_written(tmp_path: Path) -> None:
    one = opened(tmp_path)
    part = part_of(tmp_path / IDENTITY / entry_of(1).key.name)
    part.touch()
    other = opened(tmp_path)
    assert part.exists()
    one.close()
    other.close()


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
    late: list[Callable[[], BlockStore]] = []

    def before(func: Callable[[], BlockStore]) -> BlockStore:
        late.append(func)
        raise LoadCancelled

    def after(func: Callable[[], BlockStore]) -> BlockStore:
        func()
        raise LoadCancelled

    for cancelled in (before, after):
        with pytest.raises(LoadCancelled):
            shared_store(tmp_path, MUCH, None, IDENTITY, in_thread=cancelled)
        # The thread may go on when it is not waited for.
        while late:
            late.pop()()
        assert is_unused(tmp_path / IDENTITY)
    assert threads() == []
    opened(tmp_path).close()


def read_all(store: BlockStore, keys: Sequence[Key]) -> None:
    store.fetch(keys)
    while any(store.state_of(key) is Fetch.READING for key in keys):
        pass


def test_a_store_without_a_folder_keeps_what_fits_in_memory() -> None:
    store, entries = BlockStore(max_host_bytes=150), [entry_of(i) for i in range(3)]
    keys = [each.key for each in entries]
    assert [store.put(each) for each in entries] == [True] * 3
    # The first one has made room for the last.
    assert list(map(store.has, keys)) == [False, True, True]
    assert (store.num_entries, store.num_bytes, store.host_bytes) == (0, 0, 120)
    assert list(map(store.size_of, keys)) == [0, 60, 60]
    assert store.identity == ""
    assert store.seconds_to_read(keys) == 0
    assert store.flush(0)
    # There are no files to be kept for longer.
    store.mark_used([keys[1].block_hash], 300)
    store.end_retention([keys[1].block_hash])
    store.fetch(keys)
    assert [store.state_of(key) for key in keys] == [Fetch.LOST, Fetch.READY, Fetch.READY]
    store.claim(keys[1:])
    assert is_same(store.take(keys[2]), entries[2])
    assert (store.stats.num_from_host, store.stats.num_read) == (2, 0)
    store.distrust(keys[1])
    assert list(map(store.has, keys)) == [False] * 3
    assert store.host_bytes == 0
    store.close()
    assert threads() == []


def test_what_was_read_or_put_stays_in_memory_too(tmp_path: Path) -> None:
    first, entries = opened(tmp_path), [entry_of(i) for i in range(3)]
    keys = [each.key for each in entries]
    for each in entries[:2]:
        first.put(each)
    first.close()
    store = opened(tmp_path, max_host_bytes=MUCH)
    store.stats.reading.add(1, 2.0)
    size = size_of_file()
    assert store.size_of(keys[0]) == size
    assert store.seconds_to_read(keys) == 4 * size
    read_all(store, keys[:1])
    store.put(entries[2])
    assert store.flush(60)
    assert store.host_bytes == 120
    # What is in memory takes no time, and its files are not needed.
    assert store.seconds_to_read(keys) == pytest.approx(size * store.stats.reading.seconds)
    for path in tmp_path.rglob("*.block"):
        path.unlink()
    store.drop(keys)
    read_all(store, keys)
    assert [store.state_of(key) for key in keys] == [Fetch.READY, Fetch.LOST, Fetch.READY]
    stats = store.stats
    assert (stats.num_from_host, stats.num_read, stats.num_lost) == (2, 1, 1)
    assert store.size_of(keys[2]) == 60
    store.distrust(keys[2])
    assert (store.host_bytes, store.num_entries) == (0, 0)
    store.close()


def test_files_of_before_and_later_are_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    store, entries = opened(tmp_path), [entry_of(i) for i in range(2)]
    store.put(entries[0])
    store.mark_used([each.key.block_hash for each in entries], 3600)
    store.put(entries[1])
    assert store.flush(60)
    paths = [*tmp_path.rglob("*.block")]
    assert [path.stat().st_mtime for path in paths] == [10**9 + 3600] * 2
    store.end_retention([each.key.block_hash for each in entries])
    store.close()
    assert [path.stat().st_mtime for path in paths] == [10**9] * 2

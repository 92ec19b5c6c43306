"""Reading ahead of steps: in order, each once, and what is damaged is deleted and lost."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batching.block_store import read_ahead
from batching.block_store.entry_file import Entry, read
from batching.block_store.keys import Fetch, Key
from batching.block_store.read_ahead import ReadAhead
from batching.block_store.statistics import StoreStats
from tests.support.fakes import FakeClock
from tests.support.stored_entries import entry_of, is_same, opened, put_file


class Reading:
    """A thread that reads a folder with entries; it waits before each file while it is held."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        self.stats = StoreStats()
        self.entries = [entry_of(i) for i in range(6)]
        self.keys = [each.key for each in self.entries]
        self.model = opened(folder)
        self.paths = [put_file(self.model, each, used=5) for each in self.entries]
        self.read: list[Key] = []
        self.begun = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(99)
        self._done = threading.Semaphore(0)
        monkeypatch.setattr(read_ahead, "read", self._read)
        self.reader = ReadAhead(self.model, self.stats, self.clock)
        self.reader.call_when_read(self._done.release)

    def hold(self) -> None:
        """Stop before the next file."""
        self.may_go_on = threading.Semaphore(0)

    def wait(self, num: int) -> None:
        """Wait until so many were read, or are lost."""
        for _ in range(num):
            assert self._done.acquire(timeout=60)

    def fetch(self, *indices: int) -> None:
        self.reader.fetch([self.keys[i] for i in indices])

    def states(self) -> list[Fetch]:
        return [self.reader.state_of(key) for key in self.keys]

    def _read(self, path: Path, identity: str, key: Key) -> Entry:
        self.begun.release()
        assert self.may_go_on.acquire(timeout=60)
        self.read.append(key)
        self.clock.now += 2
        return read(path, identity, key)


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    made = Reading(tmp_path, monkeypatch)
    yield made
    made.may_go_on.release(99)
    made.reader.close()


UNASKED, READY, LOST = Fetch.UNASKED, Fetch.READY, Fetch.LOST


def test_what_is_asked_for_is_read_in_order(reading: Reading) -> None:
    reading.fetch(3, 1)
    # What was asked for is not read twice.
    reading.fetch(1, 3, 2)
    reading.wait(3)
    assert reading.read == [reading.keys[i] for i in (3, 1, 2)]
    assert reading.states() == [UNASKED, READY, READY, READY, UNASKED, UNASKED]
    assert (reading.stats.num_read, reading.stats.bytes_read) == (3, 180)
    assert reading.stats.reading.seconds == pytest.approx(2 / 60)
    assert reading.stats.reading.seconds == pytest.approx(6 / 180)


def test_what_is_claimed_is_taken_once(reading: Reading) -> None:
    reading.fetch(0, 1)
    reading.wait(2)
    reading.reader.claim(reading.keys[:2])
    assert reading.states()[:2] == [UNASKED, UNASKED]
    # It is there whatever else is dropped.
    reading.reader.drop(reading.keys)
    assert is_same(reading.reader.take(reading.keys[1]), reading.entries[1])
    assert is_same(reading.reader.take(reading.keys[0]), reading.entries[0])
    with pytest.raises(KeyError):
        reading.reader.take(reading.keys[0])


def test_what_was_claimed_can_be_asked_for_again(reading: Reading) -> None:
    reading.fetch(0)
    reading.wait(1)
    reading.reader.claim(reading.keys[:1])
    reading.reader.drop_claimed()
    with pytest.raises(KeyError):
        reading.reader.take(reading.keys[0])
    reading.fetch(0)
    reading.wait(1)
    assert reading.states()[0] is READY


def test_what_is_dropped_is_not_read(reading: Reading) -> None:
    reading.hold()
    reading.fetch(0, 1, 2)
    assert reading.begun.acquire(timeout=60)
    assert reading.states()[:3] == [Fetch.READING] * 3
    reading.reader.drop([*reading.keys[:2], reading.keys[5]])
    reading.may_go_on.release(2)
    reading.wait(2)
    # The first one was being read, and is not kept.
    assert reading.read == [reading.keys[0], reading.keys[2]]
    assert reading.states()[:3] == [UNASKED, UNASKED, READY]
    reading.reader.drop(reading.keys[2:3])
    assert reading.states()[2] is UNASKED


def test_what_is_dropped_and_asked_for_again_is_there(reading: Reading) -> None:
    reading.hold()
    reading.fetch(0, 1)
    assert reading.begun.acquire(timeout=60)
    reading.reader.drop(reading.keys)
    reading.fetch(1, 0)
    reading.may_go_on.release(9)
    reading.wait(2)
    assert reading.states()[:2] == [READY, READY]


def cut(path: Path) -> None:
    os.truncate(path, 100)


def damage(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-20] ^= 4
    path.write_bytes(contents)


def swap(path: Path) -> None:
    """Give it the name of another one."""
    other = next(each for each in path.parent.parent.rglob("*.block") if each != path)
    other.rename(path)


@pytest.mark.parametrize("harm", [cut, damage, swap])
def test_a_damaged_file_is_deleted_and_lost(
    harm: Callable[[Path], None], reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    harm(reading.paths[0])
    reading.fetch(0)
    reading.wait(1)
    assert reading.states()[0] is LOST
    assert not reading.paths[0].exists()
    assert reading.keys[0] not in reading.model
    assert (reading.stats.num_damaged, reading.stats.num_lost, reading.stats.num_read) == (1, 0, 0)
    (message,) = caplog.messages
    assert f"{reading.paths[0]} is damaged and deleted: it" in message
    # The next request does not ask for it, or waits until it was written again.
    reading.reader.drop(reading.keys[:1])
    put_file(reading.model, reading.entries[0])
    reading.fetch(0)
    reading.wait(1)
    assert reading.states()[0] is READY


def test_a_file_that_is_gone_is_lost(reading: Reading, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    reading.paths[0].unlink()
    reading.fetch(0, 1)
    reading.wait(2)
    assert reading.states()[:2] == [LOST, READY]
    assert reading.keys[0] not in reading.model
    assert (reading.stats.num_damaged, reading.stats.num_lost, reading.stats.num_read) == (0, 1, 1)
    assert caplog.messages == []


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError()])
def test_a_file_that_cannot_be_read_is_lost_and_stays(
    error: Exception, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Entry:
        raise error

    monkeypatch.setattr(read_ahead, "read", fail)
    reading.fetch(0)
    reading.wait(1)
    assert reading.states()[0] is LOST
    assert reading.paths[0].exists()
    assert reading.stats.num_lost == 1


def test_a_folder_that_turned_read_only_is_read(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", fail)
    cut(reading.paths[1])
    reading.fetch(0, 1)
    reading.wait(2)
    monkeypatch.undo()
    assert reading.states()[:2] == [READY, LOST]
    assert reading.keys[1] not in reading.model


def test_the_end_comes_before_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(tmp_path, monkeypatch)
    reading.hold()
    reading.fetch(*range(6))
    assert reading.begun.acquire(timeout=60)
    closing = threading.Thread(target=reading.reader.close)
    closing.start()
    while not reading.reader._is_closing:
        pass
    reading.may_go_on.release(99)
    closing.join(60)
    assert len(reading.read) == 1


def test_nothing_has_to_be_called(tmp_path: Path) -> None:
    model = opened(tmp_path)
    put_file(model, entry_of(1))
    reader = ReadAhead(model, StoreStats())
    reader.fetch([entry_of(1).key])
    while reader.state_of(entry_of(1).key) is not READY:
        pass
    reader.close()


def test_a_disk_that_does_not_answer_has_lost_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading = Reading(tmp_path, monkeypatch)
    reading.hold()
    reading.fetch(0, 1)
    assert reading.begun.acquire(timeout=60)
    assert reading.states()[:2] == [Fetch.READING] * 2
    reading.clock.now += 6
    assert reading.states()[:2] == [LOST, LOST]
    # Nobody waits for it at the end either.
    monkeypatch.setattr(read_ahead, "_PATIENCE", 0.01)
    reading.reader.close()
    reading.may_go_on.release(99)
    reading.wait(1)
    assert "the disk of" in caplog.text


def test_what_was_claimed_for_two_requests_is_had_twice(reading: Reading) -> None:
    for _ in range(2):
        reading.fetch(0)
        reading.wait(1)
        reading.reader.claim(reading.keys[:1])
    for _ in range(2):
        assert is_same(reading.reader.take(reading.keys[0]), reading.entries[0])
    with pytest.raises(KeyError):
        reading.reader.take(reading.keys[0])


def test_an_unexpected_error_is_not_the_end_of_the_thread(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Entry:
        raise AssertionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(read_ahead, "read", fail)
        reading.fetch(0)
        reading.wait(1)
    reading.fetch(1)
    reading.wait(1)
    assert reading.states()[:2] == [LOST, READY]

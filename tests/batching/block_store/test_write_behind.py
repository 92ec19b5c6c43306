"""Writing behind the answers: bounded, in order, and a disk that fails costs neither a request nor the log."""

import errno
import logging
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from batching.block_manager import BlockHash
from batching.block_store.entry_file import Entry, check
from batching.block_store.folder import StoreFolder
from batching.block_store.keys import Key
from batching.block_store.statistics import Skip, StoreStats
from batching.block_store.write_behind import WriteBehind
from batching.block_store.write_limit import WriteLimit
from tests.support.fakes import FakeClock
from tests.support.stored_entries import IDENTITY, MUCH, entry_of, size_of_file

SIZE: Final = size_of_file()


class Usage(NamedTuple):
    total: int = 1 << 40
    used: int = 0
    free: int = 1 << 40


class Writing:
    """A thread that writes to a folder, and stops before each file while it is held."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.clock = FakeClock(1000)
        self.stats = StoreStats()
        self.store = StoreFolder(folder, limits.get("max_bytes", MUCH))
        self.model = self.store.open(IDENTITY)
        self.limit = WriteLimit(folder / "written.json", limits.get("a_day"), self.clock)
        queued = limits.get("queued", MUCH)
        self.writer = WriteBehind(self.store, self.limit, queued, self.clock)
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.written: list[Key] = []
        self._plain = self.model.path_of
        self.model.path_of = self._path_of  # type: ignore[method-assign]

    def _path_of(self, key: Key) -> Path:
        assert self.may_go_on.wait(60)
        self.written.append(key)
        return self._plain(key)

    def put(self, *entries: Entry) -> list[bool]:
        return [self.writer.put(self.model, self.stats, each) for each in entries]

    def write(self, *entries: Entry) -> None:
        assert all(self.put(*entries))
        assert self.writer.flush(60)

    def files(self) -> list[Path]:
        """Return the files that have their final names, which are all whole."""
        paths = [self._plain(each) for each in self.model._sizes]
        for path in paths:
            check(path)
        return paths

    def others(self) -> list[str]:
        """Return the names of all other files."""
        known = {path.name for path in self.files()} | {"lock", "written.json"}
        found = self.store.folder.rglob("*")
        return [path.name for path in found if path.is_file() and path.name not in known]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Writing]]:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    made: list[Writing] = []

    def begin(**limits: int) -> Writing:
        made.append(Writing(tmp_path, **limits))
        return made[-1]

    yield begin
    for each in made:
        each.may_go_on.set()
        each.writer.close(60)


Make = Callable[..., Writing]


def test_what_is_queued_is_written_in_order(make: Make) -> None:
    writing, entries = make(), [entry_of(i) for i in range(9)]
    writing.write(*entries)
    assert writing.written == [each.key for each in entries]
    assert len(writing.files()) == 9
    assert writing.others() == []
    assert (writing.stats.num_written, writing.stats.bytes_written) == (9, 9 * SIZE)
    assert writing.store.num_bytes == writing.model.num_bytes == 9 * SIZE
    assert writing.limit.num_bytes == 9 * SIZE
    assert writing.writer.num_queued_bytes == 0


def test_what_finds_the_queue_full_is_skipped(make: Make) -> None:
    writing = make(queued=150)
    writing.may_go_on.clear()
    assert writing.put(entry_of(1), entry_of(2), entry_of(3), entry_of(4, 30)) == [
        True,
        True,
        False,
        True,
    ]
    assert writing.writer.num_queued_bytes == 150
    assert not writing.writer.flush(0)
    writing.may_go_on.set()
    assert writing.writer.flush(60)
    assert writing.put(entry_of(3)) == [True]
    assert writing.writer.flush(60)
    assert len(writing.files()) == 4
    assert writing.stats.skipped == {Skip.QUEUE_FULL: 1}


def test_entries_without_contents_are_waited_for_as_well(make: Make) -> None:
    """As blocks of a model are that has nothing but states."""
    writing = make()
    writing.may_go_on.clear()
    writing.put(entry_of(1, 0))
    assert not writing.writer.flush(0)
    writing.may_go_on.set()
    writing.writer.close(60)
    assert len(writing.files()) == 1


def test_prefixes_are_retained_behind_what_was_put_before(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of what is queued are not there yet when they are to be retained, or no longer."""
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    writing, entries = make(), [entry_of(i) for i in range(4)]
    hashes = [each.key.block_hash for each in entries]
    writing.may_go_on.clear()
    writing.put(entries[0])
    writing.writer.mark_used(writing.model, hashes[:3], 300)
    writing.put(entries[1])
    writing.writer.mark_used(writing.model, hashes[1:2], None)
    writing.put(entries[2], entries[3])
    assert not writing.writer.flush(0)
    # They take no room in the queue.
    assert writing.writer.num_queued_bytes == 4 * 60
    writing.may_go_on.set()
    assert writing.writer.flush(60)
    times = [writing.model.path_of(each.key).stat().st_mtime for each in entries]
    assert [times[0], times[2]] == [10**9 + 300] * 2
    assert times[1] == 10**9
    assert times[3] != 10**9 + 300
    assert writing.writer.num_queued_bytes == 0


def test_few_prefixes_wait_for_a_disk_that_hangs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = make()
    marked: list[BlockHash] = []
    monkeypatch.setattr(writing.model, "mark_used", lambda hashes, _: marked.extend(hashes))
    hashes = [entry_of(i).key.block_hash for i in range(300)]

    def mark(num: int) -> None:
        for each in hashes[:num]:
            writing.writer.mark_used(writing.model, [each], 300)

    writing.may_go_on.clear()
    writing.put(entry_of(1))
    mark(300)
    # Entries are bounded by their bytes.
    writing.put(entry_of(2))
    writing.may_go_on.set()
    assert writing.writer.flush(60)
    assert marked == hashes[:256]
    assert len(writing.files()) == 2
    mark(9)
    assert writing.writer.flush(60)
    assert marked[256:] == hashes[:9]


def test_the_end_writes_what_is_queued(make: Make, tmp_path: Path) -> None:
    writing = make()
    writing.put(*map(entry_of, range(20)))
    writing.writer.close(60)
    assert len(writing.files()) == 20
    assert WriteLimit(tmp_path / "written.json", None, writing.clock).num_bytes == 20 * SIZE


def test_the_end_waits_no_longer_than_it_may(make: Make) -> None:
    writing = make()
    writing.may_go_on.clear()
    writing.put(entry_of(1), entry_of(2))
    writing.writer.close(0.001)
    assert not writing.writer.flush()
    writing.may_go_on.set()
    writing.writer.close(60)
    # The file that was being written, and no other one.
    assert len(writing.files()) <= 1


def test_a_limit_of_the_day_is_kept(make: Make) -> None:
    writing = make(a_day=2 * SIZE + 59)
    writing.write(*map(entry_of, range(3)))
    assert len(writing.files()) == 2
    assert writing.stats.skipped == {Skip.WRITE_LIMIT: 1}
    writing.clock.now += 24 * 3600
    writing.write(entry_of(3))
    assert len(writing.files()) == 3


def test_a_folder_that_is_full_of_others_is_left_as_it_is(make: Make, tmp_path: Path) -> None:
    (tmp_path / "photos").write_bytes(bytes(SIZE))
    writing = make(max_bytes=SIZE)
    writing.write(entry_of(1))
    assert writing.files() == []
    assert writing.stats.skipped == {Skip.NO_ROOM: 1}


def test_where_there_was_no_room_none_is_looked_for_for_a_while(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time all files would be listed."""
    (tmp_path / "photos").write_bytes(bytes(SIZE))
    writing = make(max_bytes=SIZE)
    writing.write(entry_of(1))
    (tmp_path / "photos").unlink()
    writing.clock.now += 9
    writing.write(entry_of(2), entry_of(3))
    assert writing.stats.skipped == {Skip.NO_ROOM: 3}
    writing.clock.now += 1
    writing.write(entry_of(4))
    assert len(writing.files()) == 1
    assert [each for each in caplog.records if each.levelno > logging.DEBUG] == []


def test_old_files_make_room(make: Make) -> None:
    writing = make(max_bytes=3 * SIZE)
    writing.write(*map(entry_of, range(9)))
    assert 1 <= len(writing.files()) <= 3
    assert entry_of(8).key in writing.model
    assert writing.stats.num_written == 9


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """Let the system write no more than that of any file, as a full disk does: what still fits is written."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@pytest.mark.parametrize("missing", [1, 15, 16, 17, 75, 300, SIZE])
def test_a_disk_that_is_full_within_a_file_leaves_nothing(missing: int, make: Make) -> None:
    writing = make()
    with limited_files(SIZE - missing):
        writing.write(entry_of(1))
    assert writing.files() == []
    assert writing.others() == []
    assert writing.stats.skipped == {Skip.FAILED: 1}
    assert writing.store.num_bytes == writing.limit.num_bytes == 0


def failing(number: int, calls: list[Path]) -> Callable[..., Any]:
    def fail(path: Path, *_: object) -> None:
        calls.append(path)
        raise OSError(number, "No space left on device")

    return fail


def test_errors_are_waited_out_and_logged_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.WARNING)
    writing = make()
    calls: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing(errno.ENOSPC, calls))
        writing.write(entry_of(1), entry_of(2))
        writing.clock.now += 59
        writing.write(entry_of(3))
        assert len(calls) == 1
    assert writing.stats.skipped == {Skip.FAILED: 3}
    assert writing.files() == []
    assert writing.others() == []
    expected = (
        f"keys and values are not written to {tmp_path} for a minute: No space left on device"
    )
    assert caplog.messages == [expected]
    writing.clock.now += 1
    writing.write(entry_of(4))
    assert len(writing.files()) == 1


def test_a_folder_that_turns_read_only_is_left_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = make()
    calls: list[Path] = []
    monkeypatch.setattr("os.open", failing(errno.EROFS, calls))
    monkeypatch.setattr(Path, "unlink", failing(errno.EROFS, calls))
    writing.write(entry_of(1), entry_of(2))
    monkeypatch.undo()
    assert len(calls) == 1
    assert writing.stats.skipped == {Skip.FAILED: 2}


def test_a_folder_that_is_deleted_stops_nothing(make: Make, tmp_path: Path) -> None:
    writing = make()
    writing.write(entry_of(1))
    shutil.rmtree(tmp_path / IDENTITY)
    writing.write(entry_of(2))
    assert writing.stats.skipped == {Skip.FAILED: 1}
    (tmp_path / IDENTITY).mkdir()
    # Without a pause.
    writing.write(entry_of(3))
    assert writing.stats.num_written == 2


def test_a_part_that_another_server_takes_away_stops_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, plain = make(), Path.rename

    def rename(path: Path, target: Path) -> Path:
        path.unlink()
        return plain(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        writing.write(entry_of(1))
    writing.write(entry_of(2))
    assert len(writing.files()) == 1


def test_a_server_has_one_thread_for_all_models(make: Make, tmp_path: Path) -> None:
    writing = make()
    other, stats = writing.store.open("0" * 31 + "b"), StoreStats()
    assert writing.writer.put(other, stats, entry_of(1))
    writing.write(entry_of(1))
    assert other.path_of(entry_of(1).key).exists()
    assert stats.num_written == writing.stats.num_written == 1


def test_an_unexpected_error_is_not_the_end_of_the_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a bug")

    writing = make()
    with monkeypatch.context() as patch:
        patch.setattr(writing.model, "add", fail)
        writing.write(entry_of(1))
    writing.write(entry_of(2))
    assert "keys and values are not written" in caplog.text
    assert (writing.writer.num_queued_bytes, writing.stats.num_written) == (0, 1)


def test_it_is_full_with_half_of_its_queue_and_while_the_disk_is_left_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = make(queued=4 * 60)
    writing.may_go_on.clear()
    found = []
    for i in range(4):
        writing.put(entry_of(i))
        found.append(writing.writer.is_full)
    assert found == [False, False, True, True]
    writing.may_go_on.set()
    assert writing.writer.flush(60)
    assert not writing.writer.is_full
    with monkeypatch.context() as patch:
        patch.setattr("os.open", failing(errno.EIO, []))
        writing.write(entry_of(9))
    assert writing.writer.is_full
    writing.clock.now += 60
    assert not writing.writer.is_full

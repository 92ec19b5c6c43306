"""The folder of a store: bounded by size, for several servers, whose users share nothing else."""

import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from batching.block_manager import BlockHash
from batching.block_store import folder as folders
from batching.block_store.entry_file import Entry
from batching.block_store.folder import ModelFolder, NoRoom, StoreFolder, part_of
from batching.block_store.keys import Key, Kind
from batching.block_store.store import shared_store
from tests.support.fakes import FakeClock
from tests.support.stored_entries import (
    IDENTITY,
    MUCH,
    OTHER,
    entry_of,
    opened,
    put_file,
    size_of_file,
)

SIZE: Final = size_of_file()


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def ample_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 40))


def filled(store: StoreFolder, identity: str, *seeds: int) -> tuple[ModelFolder, list[Path]]:
    """Open a model with entries, whose seeds say when they were used."""
    model = store.open(identity)
    return model, [put_file(model, entry_of(seed), used=seed) for seed in seeds]


def test_what_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    store = StoreFolder(tmp_path, 4 * SIZE + 50)
    model, paths = filled(store, IDENTITY, 3, 1, 4, 2)
    store.make_room(SIZE)
    assert [path.exists() for path in paths] == [True, False, True, False]
    # It is known at once, and not asked for any more.
    assert [entry_of(seed).key in model for seed in (3, 1, 4, 2)] == [True, False, True, False]
    assert model.num_bytes == sum(path.stat().st_size for path in paths if path.exists())
    assert len(model) == 2
    assert store.num_bytes == model.num_bytes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Return the clock of the stores, in whole seconds."""
    made = FakeClock(10**9)
    monkeypatch.setattr(time, "time_ns", lambda: int(made()) * 10**9)
    # No more than is needed makes room.
    monkeypatch.setattr(folders, "_SPARE", 0)
    return made


def use(model: ModelFolder, *seeds: int, seconds: float = 0) -> None:
    model.mark_used([entry_of(seed).key.block_hash for seed in seeds], seconds)


def end_retention(model: ModelFolder, seed: int) -> None:
    model.end_retention([entry_of(seed).key.block_hash])


def state_of(entry: Entry) -> Entry:
    """Return the state behind a block."""
    return replace(entry, key=Key(Kind.STATE, entry.key.block_hash))


def left(store: StoreFolder, num: int, paths: Sequence[Path]) -> list[int]:
    """Make room until so many of these files are left; return which."""
    store.make_room(store.max_bytes - num * SIZE)
    return [i for i, path in enumerate(paths) if path.exists()]


def test_retained_files_outlive_those_that_were_used_later(
    tmp_path: Path, clock: FakeClock
) -> None:
    store = StoreFolder(tmp_path, 100 * SIZE)
    model, paths = filled(store, IDENTITY, *range(5))
    use(model, 0, 1, seconds=300)
    for seed in (4, 3, 2):
        clock.now += 60
        use(model, seed)
    assert left(store, 4, paths) == [0, 1, 2, 3]
    # What is retained goes when there is nothing else.
    assert left(store, 2, paths) == [0, 1]
    assert len(left(store, 1, paths)) == 1


def test_when_its_time_is_over_a_file_is_as_old_as_that(tmp_path: Path, clock: FakeClock) -> None:
    store = StoreFolder(tmp_path, 100 * SIZE)
    model, paths = filled(store, IDENTITY, *range(3))
    use(model, 0, seconds=300)
    clock.now += 299
    use(model, 1)
    clock.now += 2
    use(model, 2)
    assert left(store, 2, paths) == [0, 2]
    clock.now += 61
    use(model, 0)
    assert left(store, 1, paths) == [0]


def test_the_end_of_a_prefix_goes_before_its_beginning(tmp_path: Path, clock: FakeClock) -> None:
    store = StoreFolder(tmp_path, 100 * SIZE)
    model, paths = filled(store, IDENTITY, *range(4))
    use(model, 2, 0, 3, 1)
    assert [left(store, num, paths) for num in (3, 2, 1)] == [[0, 2, 3], [0, 2], [2]]


def test_a_file_is_marked_once_a_minute(tmp_path: Path, clock: FakeClock) -> None:
    model, (path,) = filled(StoreFolder(tmp_path, MUCH), IDENTITY, 1)
    times = []
    for _ in range(4):
        use(model, 1)
        times.append(path.stat().st_mtime - 10**9)
        clock.now += 31
    assert times == [0, 0, 62, 62]


def test_marking_takes_little_where_little_has_changed(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs beside the steps, with all blocks of a prompt."""
    model, _ = filled(StoreFolder(tmp_path, MUCH), IDENTITY, *range(9))
    asked: list[Kind] = []

    def key_of(kind: Kind, block_hash: BlockHash) -> Key:
        asked.append(kind)
        return Key(kind, block_hash)

    monkeypatch.setattr(folders, "Key", key_of)
    use(model, *range(9), seconds=300)
    assert asked == [Kind.BLOCK] * 9
    retained = model._retained
    clock.now += 59
    use(model, *range(9), seconds=300)
    assert len(asked) == 9
    # Nor are those that are retained copied each time.
    assert model._retained is retained
    clock.now += 2
    use(model, *range(9), seconds=300)
    assert len(asked) == 18


def test_a_retention_that_is_over_is_none_before_it_is_forgotten(
    tmp_path: Path, clock: FakeClock
) -> None:
    model = StoreFolder(tmp_path, MUCH).open(IDENTITY)
    use(model, 1, seconds=5)
    clock.now += 10
    path = put_file(model, entry_of(1), used=7)
    use(model, 1)
    assert path.stat().st_mtime == 10**9 + 10


def test_the_next_life_knows_what_is_retained(tmp_path: Path, clock: FakeClock) -> None:
    model, (path,) = filled(StoreFolder(tmp_path, MUCH), IDENTITY, 1)
    use(model, 1, seconds=300)
    model.close()
    again = StoreFolder(tmp_path, MUCH).open(IDENTITY)
    again.load()
    clock.now += 200
    use(again, 1)
    assert path.stat().st_mtime == 10**9 + 300


def test_a_use_does_not_shorten_how_long_a_file_is_retained(
    tmp_path: Path, clock: FakeClock
) -> None:
    model, (path,) = filled(StoreFolder(tmp_path, MUCH), IDENTITY, 1)
    use(model, 1, seconds=300)
    for seconds, used in ((0, 300), (299, 300), (300, 300), (361, 361)):
        clock.now = 10**9 + seconds
        use(model, 1)
        assert path.stat().st_mtime == 10**9 + used
    # Those that are gone, or never were, stay away.
    path.unlink()
    use(model, 1)
    use(model, 1, 2, seconds=300)
    assert [*tmp_path.rglob("*.block")] == []


@pytest.mark.parametrize(("seconds", "used"), [(300, 300), (25 * 3600, 90_000), (1e99, 90_000)])
def test_a_file_is_retained_for_25_hours_at_most(
    seconds: float, used: int, tmp_path: Path, clock: FakeClock
) -> None:
    model, (path,) = filled(StoreFolder(tmp_path, MUCH), IDENTITY, 1)
    # All that belongs to the prefix, as its state does.
    state = put_file(model, state_of(entry_of(1)), used=7)
    use(model, 1, seconds=seconds)
    assert [each.stat().st_mtime for each in (path, state)] == [10**9 + used] * 2


def test_files_of_a_clock_that_was_ahead_go_first(tmp_path: Path, clock: FakeClock) -> None:
    store = StoreFolder(tmp_path, 100 * SIZE)
    ahead = 10**9 + 25 * 3600 + 1
    model, paths = filled(store, IDENTITY, 5, ahead, ahead - 1)
    assert left(store, 2, paths) == [0, 2]
    # One that is used has its right time again.
    os.utime(paths[0], (ahead, ahead))
    use(model, 5)
    assert paths[0].stat().st_mtime == 10**9


def test_what_is_written_later_is_retained_as_long_as_its_prefix(
    tmp_path: Path, clock: FakeClock
) -> None:
    model = StoreFolder(tmp_path, MUCH).open(IDENTITY)
    use(model, 1, 2, seconds=300)
    end_retention(model, 2)
    clock.now += 100

    def written(seed: int) -> float:
        path = put_file(model, entry_of(seed), used=7)
        model.mark_written(entry_of(seed).key)
        return path.stat().st_mtime

    assert [written(seed) for seed in (1, 2, 3)] == [10**9 + 300, 7, 7]
    state = state_of(entry_of(1))
    path = put_file(model, state, used=7)
    model.mark_written(state.key)
    assert path.stat().st_mtime == 10**9 + 300
    clock.now += 200
    assert written(1) == 7
    # It forgets those that are over.
    use(model, 5, seconds=300)
    assert [*model._retained] == [entry_of(5).key.block_hash]


def test_the_end_of_a_retention_leaves_a_file_that_was_used_now(
    tmp_path: Path, clock: FakeClock
) -> None:
    store = StoreFolder(tmp_path, 100 * SIZE)
    model, paths = filled(store, IDENTITY, 0, 1, 2)
    use(model, 0, 1, seconds=300)
    clock.now += 10
    end_retention(model, 0)
    clock.now += 1
    use(model, 2)
    assert paths[0].stat().st_mtime == 10**9 + 10
    assert left(store, 2, paths) == [1, 2]


def test_what_fits_deletes_nothing(tmp_path: Path) -> None:
    store = StoreFolder(tmp_path, 5 * SIZE + 100)
    _, paths = filled(store, IDENTITY, 1, 2, 3)
    store.make_room(SIZE)
    assert all(path.exists() for path in paths)


def test_files_of_others_count_and_stay(tmp_path: Path) -> None:
    store = StoreFolder(tmp_path, 4 * SIZE)
    _, paths = filled(store, IDENTITY, 1, 2)
    foreign = [tmp_path / "notes.txt", tmp_path / IDENTITY / "photo", tmp_path / "mine" / "x.block"]
    foreign.append(paths[0].with_name(paths[0].name.upper()))
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(SIZE // 2))
        os.utime(path, (0, 0))
    # Another one's folder with names of the store's, but no lock.
    foreign.append(put_file(StoreFolder(tmp_path, MUCH).open(OTHER), entry_of(5), used=0))
    (tmp_path / OTHER / "lock").unlink()
    with pytest.raises(NoRoom, match="leave no room"):
        store.make_room(2 * SIZE)
    # Nor would it help to delete one's own.
    assert all(path.exists() for path in (*paths, *foreign))


def test_links_lead_nowhere(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    outside, _ = filled(StoreFolder(target, MUCH), IDENTITY, 1)
    outside.close()
    store = StoreFolder(tmp_path / "store", SIZE)
    (tmp_path / "store" / IDENTITY).symlink_to(target / IDENTITY)
    with pytest.raises(NoRoom):
        store.make_room(2 * SIZE)
    assert opened(target).num_bytes > 0


def test_models_that_another_server_has_loaded_are_left_alone(tmp_path: Path) -> None:
    other = StoreFolder(tmp_path, MUCH)
    _, (theirs,) = filled(other, OTHER, 1)
    both, (shared,) = filled(other, IDENTITY, 2)
    store = StoreFolder(tmp_path, 2 * SIZE + 50)
    mine, (own,) = filled(store, IDENTITY, 3)
    store.make_room(SIZE)
    # What is of one's own model goes, though others have it loaded, too.
    assert [path.exists() for path in (theirs, shared, own)] == [True, False, False]
    assert len(mine) == 0
    both.close()


def test_models_that_no_server_has_loaded_make_room(tmp_path: Path) -> None:
    other = StoreFolder(tmp_path, MUCH)
    model, (theirs,) = filled(other, OTHER, 1)
    left = part_of(theirs)
    left.write_bytes(bytes(SIZE))
    os.utime(left, (2, 2))
    other.close(model)
    store = StoreFolder(tmp_path, 2 * SIZE + 100)
    _, (own,) = filled(store, IDENTITY, 3)
    store.make_room(SIZE)
    assert [path.exists() for path in (theirs, left, own)] == [False, False, True]


def test_a_model_that_was_closed_is_still_there_when_it_is_opened(tmp_path: Path) -> None:
    store = StoreFolder(tmp_path, MUCH)
    model, paths = filled(store, IDENTITY, 1, 2)
    store.close(model)
    again = opened(tmp_path)
    assert entry_of(1).key in again
    assert again.size_of(entry_of(2).key) == paths[1].stat().st_size
    assert again.size_of(entry_of(3).key) == 0
    assert again.num_bytes == model.num_bytes


def test_a_file_that_is_written_again_counts_once(tmp_path: Path) -> None:
    model, (path,) = filled(StoreFolder(tmp_path, MUCH), IDENTITY, 1)
    put_file(model, entry_of(1))
    assert (len(model), model.num_bytes) == (1, path.stat().st_size)
    model.forget(entry_of(1).key)
    model.forget(entry_of(1).key)
    assert (len(model), model.num_bytes) == (0, 0)


def test_files_of_other_servers_are_counted_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_LEAST_RECOUNT", SIZE)
    store = StoreFolder(tmp_path, 10 * SIZE)
    filled(store, IDENTITY, 1)
    store.make_room(SIZE)
    before = store.num_bytes
    other = StoreFolder(tmp_path, 10 * SIZE)
    filled(other, OTHER, 2, 3)
    store.make_room(SIZE)
    assert store.num_bytes == before
    store.add(SIZE + 1)
    store.make_room(SIZE)
    assert store.num_bytes > 2 * before


def test_what_others_have_deleted_leaves_room(tmp_path: Path) -> None:
    store = StoreFolder(tmp_path, 3 * SIZE)
    model, paths = filled(store, IDENTITY, 1, 2)
    store.make_room(0)
    paths[0].unlink()
    store.make_room(SIZE)
    assert paths[1].exists()
    assert len(model) == 2


def test_files_that_vanish_while_room_is_made_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreFolder(tmp_path, 3 * SIZE)
    _, paths = filled(store, IDENTITY, 1, 2, 3)
    others = [paths[0], paths[1]]
    plain = Path.unlink

    def unlink(path: Path) -> None:
        while others:
            plain(others.pop())
        plain(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    store.make_room(SIZE)
    assert [path.exists() for path in paths] == [False, False, True]


def test_what_may_not_be_looked_into_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `lost+found` is, on a disk of its own."""
    store = StoreFolder(tmp_path, 4 * SIZE)
    _, paths = filled(store, IDENTITY, 1, 2)
    (tmp_path / "lost+found").mkdir()
    plain = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    store.make_room(SIZE)
    store.make_room(2 * SIZE + 10)
    assert [path.exists() for path in paths] == [False, True]


@pytest.mark.parametrize(
    ("total", "free", "fits"), [(1000, 61, True), (1000, 59, False), (1 << 40, 8 << 30, False)]
)
def test_the_disk_is_not_filled(
    total: int, free: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreFolder(tmp_path, MUCH)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total, 0, free))
    if fits:
        store.make_room(10)
        return
    with pytest.raises(NoRoom, match="the disk is nearly full: "):
        store.make_room(10)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_can_look_into_it(tmp_path: Path) -> None:
    store = shared_store(tmp_path / "store", MUCH, MUCH, IDENTITY)
    entry = entry_of(1)
    store.put(entry)
    store.close()
    found = [*(tmp_path / "store").rglob("*")]
    assert {path.name for path in found if path.is_file()} == {
        entry.key.name,
        "lock",
        "written.json",
    }
    assert mode_of(tmp_path / "store") == 0o700
    assert {mode_of(path) for path in found if path.is_dir()} == {0o700}
    assert {mode_of(path) for path in found if path.is_file()} == {0o600}


def test_a_folder_that_is_a_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with pytest.raises(FileExistsError):
        StoreFolder(tmp_path / "store", MUCH)
    with pytest.raises(NotADirectoryError):
        StoreFolder(tmp_path / "store" / "within", MUCH)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="another user can write to it"):
        StoreFolder(tmp_path, MUCH)


def test_the_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user can write to it"):
        StoreFolder(tmp_path, MUCH)


def test_a_folder_without_locks_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: int) -> None:
        raise OSError(37, "No locks available")

    num_open = len(os.listdir("/dev/fd"))
    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="No locks"):
        StoreFolder(tmp_path, MUCH).open(IDENTITY)
    assert len(os.listdir("/dev/fd")) == num_open


def test_what_a_killed_server_was_writing_is_deleted_by_the_next(tmp_path: Path) -> None:
    model, (path,) = filled(StoreFolder(tmp_path, MUCH), IDENTITY, 1)
    left, foreign = part_of(path), path.with_name(".notes.txt.123")
    left.touch()
    foreign.touch()
    # Another server may be writing it.
    opened(tmp_path).close()
    assert left.exists()
    model.close()
    again = opened(tmp_path)
    assert [each.exists() for each in (left, foreign, path)] == [False, True, True]
    assert len(again) == 1


class Disk:
    """A disk that a store's folder shares with others, of which so many files' sizes are free."""

    def __init__(self, folder: Path, free: int) -> None:
        self._folder = folder
        self._free = free * SIZE + self._num_bytes()

    def _num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.rglob("*.block"))

    def usage(self, _: Path) -> Usage:
        return Usage(2000 * SIZE, 0, self._free - self._num_bytes())


@pytest.mark.parametrize(
    ("free", "left"),
    [
        (101, 100),
        # One of a hundred would do, or two, and five more go.
        (100, 94),
        (99, 93),
        (1, 0),
        # All of them would not do.
        (0, 100),
    ],
)
def test_own_files_make_room_where_the_disk_is_nearly_full(
    free: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreFolder(tmp_path, MUCH)
    model = store.open(IDENTITY)
    paths = [put_file(model, entry_of(i), used=10 + i) for i in range(100)]
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, free).usage)
    with nullcontext() if free else pytest.raises(NoRoom, match="the disk is nearly full: "):
        store.make_room(SIZE)
    assert [path for path in paths if path.exists()] == paths[100 - left :]
    assert len(model) == left


@pytest.mark.parametrize("is_disk", [False, True])
def test_files_are_listed_for_some_of_those_that_are_written(
    is_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreFolder(tmp_path, MUCH if is_disk else 100 * SIZE)
    model = store.open(IDENTITY)
    for i in range(100):
        put_file(model, entry_of(i), used=i)
    if is_disk:
        monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, 100).usage)
    plain, listed = folders.model_folders, []

    def model_folders(folder: Path) -> Iterator[Path]:
        listed.append(folder)
        return plain(folder)

    monkeypatch.setattr(folders, "model_folders", model_folders)
    for i in range(100, 120):
        store.make_room(SIZE)
        put_file(model, entry_of(i), used=i)
        store.add(SIZE)
    assert 2 <= len(listed) <= 5

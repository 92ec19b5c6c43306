"""The limit of what is written in a day: it outlives restarts, and no clock stops the store for good."""

from pathlib import Path
from typing import Final

import pytest

from batching.block_store import write_limit
from batching.block_store.write_limit import WriteLimit
from tests.support.fakes import FakeClock
from tests.support.rows import rows

DAY: Final = 24 * 3600.0


def limit_of(folder: Path, clock: FakeClock, max_bytes: int | None = 100) -> WriteLimit:
    return WriteLimit(folder / "written.json", max_bytes, clock)


def test_a_day_has_so_many_bytes(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.now = 5 * DAY
    limit = limit_of(tmp_path, clock)
    limit.add(60)
    assert limit.has_room(40)
    assert not limit.has_room(41)
    clock.now += DAY - 1
    assert not limit.has_room(41)
    clock.now += 1
    assert limit.num_bytes == 0
    assert limit.has_room(100)
    assert not limit.has_room(101)


def test_without_a_limit_there_is_always_room(tmp_path: Path) -> None:
    limit = limit_of(tmp_path, FakeClock(), None)
    limit.add(1 << 50)
    assert limit.has_room(1 << 50)
    assert limit.num_bytes == 1 << 50


def test_a_restart_begins_no_new_day(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.now = 5 * DAY
    limit = limit_of(tmp_path, clock)
    limit.add(60)
    limit.save()
    again = limit_of(tmp_path, clock)
    assert again.num_bytes == 60
    clock.now += DAY
    assert limit_of(tmp_path, clock).num_bytes == 0


@pytest.mark.parametrize("jump", [-3 * DAY, -1 * DAY, DAY, 400 * DAY])
def test_a_clock_that_jumps_begins_a_new_day(jump: float, tmp_path: Path) -> None:
    clock = FakeClock()
    clock.now = 5 * DAY
    limit = limit_of(tmp_path, clock)
    limit.add(100)
    limit.save()
    clock.now += jump
    assert limit.has_room(100)
    assert limit_of(tmp_path, clock).has_room(100)
    limit.add(70)
    assert not limit.has_room(31)


def test_a_server_that_is_killed_forgets_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_limit, "_SAVED_EVERY", 30)
    limit, found = limit_of(tmp_path, FakeClock(), 1000), []
    for _ in range(5):
        limit.add(20)
        found.append(limit_of(tmp_path, FakeClock()).num_bytes)
    assert found == [0, 40, 40, 80, 80]


@rows("text", ["", "[", "[1]", "{}", "null", "[1, 1e999]", '["x", 2]', "[0, [1]]", "\xff"])
def test_a_damaged_file_counts_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "written.json").write_bytes(text.encode("latin1"))
    assert limit_of(tmp_path, FakeClock()).num_bytes == 0


def test_a_count_that_cannot_be_saved_goes_on(tmp_path: Path) -> None:
    limit = limit_of(tmp_path / "gone", FakeClock())
    limit.add(60)
    limit.save()
    assert not limit.has_room(41)

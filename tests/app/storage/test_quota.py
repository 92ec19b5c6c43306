"""What an owner may have on the disk."""

import pytest

from app.storage.disk.quota import Account, NoRoomForFile


class Stored:
    """The database, which counts so many bytes, and how often it was asked."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self.num_asked = 0

    def __call__(self) -> int:
        self.num_asked += 1
        return self.num_bytes

    def store(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def test_what_is_written_at_once_has_one_limit() -> None:
    account = Account(100, Stored())
    first, second = account.open(), account.open()
    first.add(60)
    with pytest.raises(NoRoomForFile):
        second.add(41)
    second.add(40)
    with pytest.raises(NoRoomForFile):
        account.check()
    first.close()
    second.add(60)
    assert (first.num_bytes, second.num_bytes) == (0, 100)


def test_what_is_stored_counts_once() -> None:
    stored = Stored()
    account = Account(100, stored)
    charge = account.open()
    for _ in range(2):
        charge.add(30)
        charge.store(lambda num_bytes: stored.store(num_bytes - stored.num_bytes))
        charge.store(lambda _: None)
    charge.close()
    assert stored.num_bytes == 60
    other = account.open()
    with pytest.raises(NoRoomForFile):
        other.add(41)
    other.add(40)


def test_what_was_deleted_makes_room() -> None:
    stored = Stored(100)
    account = Account(100, stored)
    charge = account.open()
    with pytest.raises(NoRoomForFile):
        charge.check()
    stored.num_bytes = 50
    charge.add(50)
    assert stored.num_asked == 3


def test_the_database_is_not_asked_for_each_write() -> None:
    stored = Stored(20)
    charge = Account(100, stored).open()
    charge.check()
    for _ in range(80):
        charge.add(1)
    assert stored.num_asked == 1


def test_what_a_crash_has_left_counts_whatever_the_limit() -> None:
    account = Account(100, Stored(80))
    charge = account.open(num_stored=80)
    charge.set(120)
    with pytest.raises(NoRoomForFile):
        charge.add(1)
    charge.set(0)
    charge.add(100)


@pytest.mark.parametrize(("max_bytes", "shown"), [(10 << 30, "10240 MiB"), (1 << 19, "0.5 MiB")])
def test_the_message_has_the_limit_and_its_setting(max_bytes: int, shown: str) -> None:
    assert f"{shown} (MLX_SERVER_MAX_FILES_MIB)" in str(NoRoomForFile(max_bytes))

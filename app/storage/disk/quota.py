"""How much each owner may have on the disk, and how much it has."""

from collections.abc import Callable
from threading import Lock
from typing import Final, TypeVar

T = TypeVar("T")

_MIB: Final = 1 << 20


class NoRoomForFile(Exception):
    """An owner has, or would have, more on the disk than it may."""

    def __init__(self, max_bytes: int) -> None:
        size = f"{max_bytes / _MIB:.1f}".removesuffix(".0")
        super().__init__(
            "the files of this API key and the results of its batches reach the limit of a key, "
            f"{size} MiB (MLX_SERVER_MAX_FILES_MIB): delete some"
        )


class Account:
    """Limits what one owner has on the disk; worker threads share it.

    That is what the database counts, and what this server has written since: uploads that are not complete,
    and results of batches.  The database is not asked for each write, but when something begins, and before
    a write is refused, since files are deleted.

    lock: held while one of the numbers changes.
    num_stored: bytes that the database counts, when it was last asked.
    num_unstored: bytes beside them.
    """

    def __init__(self, max_bytes: int, count_stored: Callable[[], int]) -> None:
        self.lock: Final = Lock()
        self.num_stored = 0
        self.num_unstored = 0
        self._max_bytes: Final = max_bytes
        self._count_stored: Final = count_stored

    def open(self, num_stored: int = 0) -> "Charge":
        """Return a charge of which the database counts `num_stored` bytes."""
        return Charge(self, num_stored)

    def check(self) -> None:
        """Raise NoRoomForFile if there is room for nothing more."""
        with self.lock:
            self.look_up()
            self.require(1)

    def require(self, num_bytes: int) -> None:
        """Raise NoRoomForFile if there is no room for so many bytes more."""
        if not self._has_room(num_bytes):
            self.look_up()
            if not self._has_room(num_bytes):
                raise NoRoomForFile(self._max_bytes)

    def look_up(self) -> None:
        self.num_stored = self._count_stored()

    def _has_room(self, num_bytes: int) -> bool:
        return self.num_stored + self.num_unstored + num_bytes <= self._max_bytes


class Charge:
    """The bytes of an upload, or of the results of a batch, on the account of its owner.

    num_bytes: how many there are.
    """

    def __init__(self, account: Account, num_stored: int) -> None:
        self.num_bytes = num_stored
        self._account: Final = account
        self._num_stored = num_stored

    def check(self) -> None:
        """Raise NoRoomForFile if there is room for nothing more."""
        self._account.check()

    def add(self, num_bytes: int) -> None:
        """Count bytes before they are written.

        Raises:
            NoRoomForFile: the owner may have no more; nothing is counted.
        """
        with self._account.lock:
            self._account.require(num_bytes)
            self._set(self.num_bytes + num_bytes)

    def set(self, num_bytes: int) -> None:
        """Set how many there are, as a crash may have left them, whatever the limit."""
        with self._account.lock:
            self._account.look_up()
            self._set(num_bytes)

    def store(self, commit: Callable[[int], T]) -> T:
        """Call what lets the database count the bytes, whose number it gets."""
        with self._account.lock:
            result = commit(self.num_bytes)
            num_new = self.num_bytes - self._num_stored
            self._num_stored = self.num_bytes
            self._account.num_stored += num_new
            self._account.num_unstored -= num_new
        return result

    def close(self) -> None:
        """Count nothing of it any longer but what the database counts."""
        with self._account.lock:
            self._set(self._num_stored)

    def _set(self, num_bytes: int) -> None:
        self._account.num_unstored += num_bytes - self.num_bytes
        self.num_bytes = num_bytes

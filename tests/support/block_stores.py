"""A store of blocks in memory, which takes its time and loses things."""

from collections.abc import Callable, Sequence

from batching.block_manager import BlockHash
from batching.block_store.entry_file import Entry
from batching.block_store.keys import Fetch, Key
from batching.block_store.statistics import StoreStats


class FakeStore:
    """What is read is there after some questions, or lost.

    draw: returns a number in [0, n] where it has a choice.
    """

    def __init__(self, draw: Callable[[int], int] = lambda _: 0) -> None:
        self.entries: dict[Key, Entry] = {}
        self.used: list[tuple[list[BlockHash], float | None]] = []
        self.stats = StoreStats()
        self._draw = draw
        self._asked: dict[Key, Fetch] = {}
        self._claimed: dict[Key, Entry] = {}

    def has(self, key: Key) -> bool:
        return key in self.entries

    @property
    def is_full(self) -> bool:
        return False

    @property
    def num_entries(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(map(self.size_of, self.entries))

    def size_of(self, key: Key) -> int:
        return self.entries[key].num_bytes if key in self.entries else 0

    host_bytes = 0

    def seconds_to_read(self, keys: Sequence[Key]) -> float:
        return sum(map(self.size_of, keys)) * self.stats.reading.seconds

    def mark_used(self, hashes: Sequence[BlockHash], seconds: float) -> None:
        self.used.append(([*hashes], seconds))

    def end_retention(self, hashes: Sequence[BlockHash]) -> None:
        self.used.append(([*hashes], None))

    def fetch(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._asked.setdefault(key, Fetch.READING)

    def state_of(self, key: Key) -> Fetch:
        if self._asked.get(key) is Fetch.READING:
            self._go_on(key)
        return self._asked.get(key, Fetch.UNASKED)

    def _go_on(self, key: Key) -> None:
        if self._draw(15) == 15:
            self.entries.pop(key, None)
        if key not in self.entries:
            self._asked[key] = Fetch.LOST
        elif not self._draw(2):
            self._asked[key] = Fetch.READY

    def drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._asked.pop(key, None)

    def claim(self, keys: Sequence[Key]) -> None:
        for key in keys:
            assert self._asked.pop(key) is Fetch.READY
            self._claimed[key] = self.entries[key]

    def take(self, key: Key) -> Entry:
        self.stats.num_read += 1
        return self._claimed.pop(key)

    def drop_claimed(self) -> None:
        self._claimed.clear()

    def put(self, entry: Entry) -> bool:
        self.entries[entry.key] = entry
        self.stats.num_written += 1
        self.stats.bytes_written += entry.num_bytes
        return True

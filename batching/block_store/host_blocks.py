"""Entries in the memory of the host, for devices that have one of their own."""

import threading
from collections import OrderedDict
from typing import Final

from batching.block_store.entry_file import Entry
from batching.block_store.keys import Key


class HostBlocks:
    """Keeps entries of one model in at most so many bytes; the least recently used ones make room.

    Any thread may use it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes: Final = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        """Return an entry, which is used last then."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def add(self, entry: Entry) -> None:
        with self._lock:
            self._remove(entry.key)
            self._entries[entry.key] = entry
            self.num_bytes += entry.num_bytes
            while self.num_bytes > self.max_bytes:
                self._remove(next(iter(self._entries)))

    def forget_all(self) -> None:
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0

    def _remove(self, key: Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.num_bytes -= entry.num_bytes

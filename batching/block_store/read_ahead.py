"""Reads entries of a model, in a thread, before steps need them."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import Final

from batching.block_store.entry_file import DamagedEntry, Entry, read
from batching.block_store.folder import ModelFolder
from batching.block_store.host_blocks import HostBlocks
from batching.block_store.keys import Fetch, Key
from batching.block_store.statistics import StoreStats

logger = logging.getLogger(__name__)

# How long a disk may take for a file, in seconds.
_PATIENCE: Final = 5.0


class ReadAhead:
    """Reads what is asked for, in that order; it is kept until it is claimed, and taken, or dropped.

    What is in the host's memory is there at once, and what was read stays there.  A file that is not what was written
    is deleted.  While a disk does not answer, all that is asked for counts as lost.
    """

    def __init__(
        self,
        model: ModelFolder | None,
        stats: StoreStats,
        clock: Callable[[], float] = monotonic,
        host: HostBlocks | None = None,
    ) -> None:
        """`model` is the folder to read from, and `host` the memory; None is none."""
        self._model = model
        self._host = HostBlocks(0) if host is None else host
        self._stats = stats
        self._clock = clock
        self._on_read: Callable[[], None] = lambda: None
        self._asked: deque[Key] = deque()
        # None is lost.
        self._fetched: dict[Key, Entry | None] = {}
        self._wanted: set[Key] = set()
        # Several requests of a step may restore the same.
        self._claimed: dict[Key, list[Entry]] = {}
        # When the read began that is in progress.
        self._began: float | None = None
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-store-reader", daemon=True)
        self._thread.start()

    def call_when_read(self, func: Callable[[], None]) -> None:
        """Set what the thread calls when something was read, or is lost."""
        self._on_read = func

    def fetch(self, keys: Iterable[Key]) -> None:
        """Read these, unless that was asked for."""
        with self._changed:
            for key in keys:
                if key in self._wanted:
                    continue
                self._wanted.add(key)
                entry = self._host.get(key)
                if entry is not None or self._model is None or self._is_stuck():
                    self._fetched[key] = entry
                    self._stats.num_from_host += entry is not None
                else:
                    self._asked.append(key)
            self._changed.notify()

    def state_of(self, key: Key) -> Fetch:
        with self._changed:
            if key not in self._wanted:
                return Fetch.UNASKED
            if key not in self._fetched:
                return Fetch.LOST if self._is_stuck() else Fetch.READING
            return Fetch.LOST if self._fetched[key] is None else Fetch.READY

    def claim(self, keys: Iterable[Key]) -> None:
        """Keep these, which are READY, until they are taken."""
        with self._changed:
            for key in keys:
                self._wanted.discard(key)
                entry = self._fetched.pop(key)
                assert entry is not None, "it was read"
                self._claimed.setdefault(key, []).append(entry)

    def take(self, key: Key) -> Entry:
        """Return what was claimed, as often as it was."""
        entry = self._claimed[key].pop()
        if not self._claimed[key]:
            del self._claimed[key]
        return entry

    def drop_claimed(self) -> None:
        self._claimed.clear()

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget what was asked for."""
        with self._changed:
            for key in keys:
                self._wanted.discard(key)
                self._fetched.pop(key, None)

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_PATIENCE)

    def _is_stuck(self) -> bool:
        # Once: another thread sets it.
        began = self._began
        return began is not None and self._clock() - began > _PATIENCE

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._is_closing)
                if self._is_closing:
                    return
                key = self._asked.popleft()
                if key not in self._wanted:
                    continue
            assert self._model is not None
            self._began = self._clock()
            entry = self._read(self._model, key)
            if self._is_stuck():
                logger.warning("the disk of %s has taken seconds for a file", self._model.identity)
            self._began = None
            with self._changed:
                if key in self._wanted:
                    self._fetched[key] = entry
            self._on_read()

    def _read(self, model: ModelFolder, key: Key) -> Entry | None:
        path, began = model.path_of(key), self._clock()
        try:
            entry = read(path, model.identity, key)
        except DamagedEntry as reason:
            logger.warning("%s is damaged and deleted: %s", path, reason)
            self._stats.num_damaged += 1
            with suppress(OSError):
                path.unlink()
        # Whatever it is, requests wait for this thread.
        except Exception as error:
            logger.debug("%s cannot be read: %r", path, error)
            self._stats.num_lost += 1
        else:
            self._count(entry.num_bytes, self._clock() - began)
            self._host.add(entry)
            return entry
        model.forget(key)
        return None

    def _count(self, num_bytes: int, seconds: float) -> None:
        self._stats.num_read += 1
        self._stats.bytes_read += num_bytes
        self._stats.reading.add(num_bytes, seconds)

"""Writes entries to a folder, in a thread, behind the answers."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from batching.block_manager import BlockHash
from batching.block_store.entry_file import Entry, write
from batching.block_store.folder import ModelFolder, NoRoom, StoreFolder, part_of
from batching.block_store.statistics import Skip, StoreStats
from batching.block_store.write_limit import WriteLimit

logger = logging.getLogger(__name__)

# After an error of the disk it is left alone for so many seconds, and after room was looked for and not found.
_PAUSE: Final = 60.0
_PAUSE_FOR_ROOM: Final = 10.0
# So many prefixes wait to be marked at most: a disk that hangs may do so for long.
_MAX_MARKS: Final = 256


class _Waiting(NamedTuple):
    model: ModelFolder
    stats: StoreStats
    entry: Entry


class _Used(NamedTuple):
    """`seconds` are None where a retention ends."""

    model: ModelFolder
    hashes: Sequence[BlockHash]
    seconds: float | None

    def mark(self) -> None:
        if self.seconds is None:
            self.model.end_retention(self.hashes)
        else:
            self.model.mark_used(self.hashes, self.seconds)


class WriteBehind:
    """One thread of a server, for all of its models, with a queue of so many bytes.

    A file gets its name when all is written to it, and is not synced: the checksum finds what a loss of power has
    torn.  What finds the queue or the folder full is not written.
    """

    def __init__(
        self,
        folder: StoreFolder,
        limit: WriteLimit,
        max_queued_bytes: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._folder = folder
        self._limit = limit
        self._max_queued_bytes = max_queued_bytes
        self._clock = clock
        self._queue: deque[_Waiting | _Used] = deque()
        # Those that are being written included.
        self._num_queued = self._num_queued_bytes = self._num_marks = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._paused_until = 0.0
        self._paused_for = Skip.FAILED
        self._thread = threading.Thread(target=self._run, name="kv-store-writer", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """True while half of the queue waits, or the disk is left alone: who waits for less loses nothing."""
        is_paused = self._clock() < self._paused_until
        return is_paused or self._num_queued_bytes > self._max_queued_bytes // 2

    @property
    def num_queued_bytes(self) -> int:
        return self._num_queued_bytes

    def put(self, model: ModelFolder, stats: StoreStats, entry: Entry) -> bool:
        """Queue an entry; return False if there is no room for it."""
        with self._changed:
            if self._num_queued_bytes + entry.num_bytes > self._max_queued_bytes:
                stats.skipped[Skip.QUEUE_FULL] += 1
                return False
            self._num_queued_bytes += entry.num_bytes
            self._append(_Waiting(model, stats, entry))
        return True

    def mark_used(
        self, model: ModelFolder, hashes: Sequence[BlockHash], seconds: float | None
    ) -> None:
        """Queue `ModelFolder.mark_used`, or `end_retention` if there are no seconds, behind the entries before.

        What finds too many of them in the queue is left out.
        """
        with self._changed:
            if self._num_marks < _MAX_MARKS:
                self._num_marks += 1
                self._append(_Used(model, hashes, seconds))

    def _append(self, item: "_Waiting | _Used") -> None:
        self._queue.append(item)
        self._num_queued += 1
        self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that is queued was written; return whether it was, within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_queued or self._is_closing, timeout)
            return not self._num_queued

    def close(self, timeout: float | None = None) -> None:
        """Write what is queued, for `timeout` seconds at most, and end the thread."""
        self.flush(timeout)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        self._limit.save()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if self._is_closing:
                    return
                item = self._queue.popleft()
            try:
                self._do(item)
            except Exception:
                # The queue would be full for good.
                logger.exception("keys and values are not written")
            with self._changed:
                self._num_queued -= 1
                if isinstance(item, _Used):
                    self._num_marks -= 1
                else:
                    self._num_queued_bytes -= item.entry.num_bytes
                self._changed.notify_all()

    def _do(self, item: "_Waiting | _Used") -> None:
        if isinstance(item, _Used):
            item.mark()
        else:
            self._write(item)

    def _write(self, waiting: _Waiting) -> None:
        model, stats, entry = waiting
        if self._clock() < self._paused_until:
            stats.skipped[self._paused_for] += 1
            return
        if not self._limit.has_room(entry.num_bytes):
            stats.skipped[Skip.WRITE_LIMIT] += 1
            return
        began = self._clock()
        try:
            self._folder.make_room(entry.num_bytes)
            num_bytes = _write_file(model.path_of(entry.key), model.identity, entry)
        except NoRoom as reason:
            logger.debug("%s is not written: %s", entry.key.name, reason)
            self._pause(Skip.NO_ROOM, _PAUSE_FOR_ROOM)
            stats.skipped[Skip.NO_ROOM] += 1
            return
        except FileNotFoundError as error:
            # Its folder was deleted, or another server has taken it for what a killed one has left.
            logger.debug("%s is not written: %s", entry.key.name, error)
            stats.skipped[Skip.FAILED] += 1
            return
        except OSError as error:
            logger.warning(
                "keys and values are not written to %s for a minute: %s",
                self._folder.folder,
                error.strerror or error,
            )
            self._pause(Skip.FAILED, _PAUSE)
            stats.skipped[Skip.FAILED] += 1
            return
        self._folder.add(num_bytes)
        self._limit.add(num_bytes)
        model.add(entry.key, num_bytes)
        model.mark_written(entry.key)
        stats.num_written += 1
        stats.bytes_written += num_bytes
        stats.writing.add(1, self._clock() - began)

    def _pause(self, reason: Skip, seconds: float) -> None:
        self._paused_until = self._clock() + seconds
        self._paused_for = reason


def _write_file(path: Path, identity: str, entry: Entry) -> int:
    """Write a file that nothing else writes; return its size."""
    part = part_of(path)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            num_bytes = write(descriptor, identity, entry)
        finally:
            os.close(descriptor)
        part.rename(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return num_bytes

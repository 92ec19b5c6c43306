"""The store of a server, which is a folder and a thread that writes, and those of its models."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final

from batching.block_manager import BlockHash
from batching.block_store.entry_file import Entry
from batching.block_store.folder import ModelFolder, StoreFolder
from batching.block_store.host_blocks import HostBlocks
from batching.block_store.keys import Fetch, Key
from batching.block_store.read_ahead import ReadAhead
from batching.block_store.statistics import StoreStats
from batching.block_store.write_behind import WriteBehind
from batching.block_store.write_limit import WriteLimit

_MAX_QUEUED_BYTES: Final = 256 << 20
_WRITTEN_FILE: Final = "written.json"
# That writing what is queued may take at the end.
_CLOSE_SECONDS: Final = 5.0


_shared: Final[dict[Path, "ServerStore"]] = {}
_lock: Final = Lock()


def shared_store(
    folder: Path,
    max_bytes: int,
    max_written_a_day: int | None,
    identity: str,
    model_id: str = "",
    max_host_bytes: int = 0,
    in_thread: Callable[[Callable[[], "BlockStore"]], "BlockStore"] = lambda func: func(),
) -> "BlockStore":
    """Return the store of a model in a folder, which the first model of this process opens and the last one closes.

    model_id: for those who list the folder.
    max_host_bytes: of the entries that stay in the host's memory, too.
    in_thread: opens it, which may take long, as there may be many files, and another process may be at work in the
        folder.  It may raise before that is done; the store is closed then.

    Raises:
        OSError: it cannot be used, or another user can change it.
    """

    def open_store() -> BlockStore:
        with _lock:
            key = folder.resolve()
            server = _shared.get(key) or ServerStore(key, max_bytes, max_written_a_day)
            opened = server.open(identity, model_id)
            _shared[key] = server
        opened.load()
        on_disk = ModelOnDisk(opened, server.writer, partial(server.leave, opened))
        return BlockStore(on_disk, max_host_bytes)

    opening = _Opening(open_store)
    try:
        return in_thread(opening.run)
    except BaseException:
        opening.abandon()
        raise


class _Opening:
    """Opens a store, and closes it if it is not waited for any more."""

    def __init__(self, open_store: "Callable[[], BlockStore]") -> None:
        self._open_store = open_store
        self._lock = Lock()
        self._store: BlockStore | None = None
        self._is_abandoned = False

    def run(self) -> "BlockStore":
        store = self._open_store()
        with self._lock:
            self._store = store
            is_abandoned = self._is_abandoned
        if is_abandoned:
            store.close()
        return store

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            store = self._store
        if store is not None:
            store.close()


class ServerStore:
    """The store of all models of a server; it ends with the last of them."""

    def __init__(self, folder: Path, max_bytes: int, max_written_a_day: int | None) -> None:
        """Use a folder, which is made if it is not there.

        Raises:
            OSError: it cannot be used, or another user can change it.
        """
        self._folder = StoreFolder(folder, max_bytes)
        self._limit = WriteLimit(folder / _WRITTEN_FILE, max_written_a_day)
        self._writer: WriteBehind | None = None
        self._num_open = 0

    @property
    def writer(self) -> WriteBehind:
        assert self._writer is not None, "a model is open"
        return self._writer

    def open(self, identity: str, model_id: str = "") -> ModelFolder:
        """Return the folder of the model with this identity.

        Raises:
            OSError: it cannot be made.
        """
        folder = self._folder.open(identity, model_id)
        if self._writer is None:
            self._writer = WriteBehind(self._folder, self._limit, _MAX_QUEUED_BYTES)
        self._num_open += 1
        return folder

    def leave(self, folder: ModelFolder) -> None:
        """Close the folder of a model; with the last one, write what is queued, within some seconds."""
        with _lock:
            self._folder.close(folder)
            self._num_open -= 1
            is_last = self._num_open == 0
            if is_last:
                _shared.pop(self._folder.folder, None)
        if is_last:
            self.writer.close(_CLOSE_SECONDS)


@dataclass(frozen=True)
class ModelOnDisk:
    """The part of a server's store that a model has."""

    folder: ModelFolder
    writer: WriteBehind
    close: Callable[[], None]


class BlockStore:
    """The entries of one model, on disk and in the host's memory: which there are, reading and writing them.

    The thread of the engine asks; two others read and write.
    """

    def __init__(self, disk: "ModelOnDisk | None" = None, max_host_bytes: int = 0) -> None:
        """`disk` is where entries outlive the process; None is nowhere."""
        self.stats: Final = StoreStats()
        self._disk = disk
        self._host = HostBlocks(max_host_bytes)
        folder = None if disk is None else disk.folder
        self._reader = ReadAhead(folder, self.stats, host=self._host)

    @property
    def identity(self) -> str:
        """The name of the model's folder; empty if it has none."""
        return "" if self._disk is None else self._disk.folder.identity

    def call_when_read(self, func: Callable[[], None]) -> None:
        """Set what is called, in a thread, when something that was fetched is there, or is lost."""
        self._reader.call_when_read(func)

    def has(self, key: Key) -> bool:
        return key in self._host or (self._disk is not None and key in self._disk.folder)

    @property
    def num_entries(self) -> int:
        """How many there are on disk."""
        return 0 if self._disk is None else len(self._disk.folder)

    @property
    def num_bytes(self) -> int:
        """The size of those on disk."""
        return 0 if self._disk is None else self._disk.folder.num_bytes

    @property
    def host_bytes(self) -> int:
        """The size of those in the host's memory."""
        return self._host.num_bytes

    @property
    def is_full(self) -> bool:
        """True while it takes no more than it has to write already."""
        return self._disk is not None and self._disk.writer.is_full

    def size_of(self, key: Key) -> int:
        if (entry := self._host.get(key)) is not None:
            return entry.num_bytes
        return 0 if self._disk is None else self._disk.folder.size_of(key)

    def seconds_to_read(self, keys: Sequence[Key]) -> float:
        """Return about how long reading these takes; 0 before anything was read."""
        if self._disk is None:
            return 0.0
        num_bytes = sum(self._disk.folder.size_of(key) for key in keys if key not in self._host)
        return num_bytes * self.stats.reading.seconds

    def mark_used(self, hashes: Sequence[BlockHash], seconds: float) -> None:
        """Record that the blocks of a prefix are used until so many seconds from now: their entries are deleted later."""
        if self._disk is not None:
            self._disk.writer.mark_used(self._disk.folder, hashes, seconds)

    def end_retention(self, hashes: Sequence[BlockHash]) -> None:
        """Record that these blocks are used no longer than now."""
        if self._disk is not None:
            self._disk.writer.mark_used(self._disk.folder, hashes, None)

    def fetch(self, keys: Sequence[Key]) -> None:
        """Begin to read these, in this order."""
        self._reader.fetch(keys)

    def state_of(self, key: Key) -> Fetch:
        return self._reader.state_of(key)

    def claim(self, keys: Sequence[Key]) -> None:
        """Keep these, which are READY, until they are taken."""
        self._reader.claim(keys)

    def take(self, key: Key) -> Entry:
        """Return what was claimed, once."""
        return self._reader.take(key)

    def drop_claimed(self) -> None:
        """Forget what was claimed."""
        self._reader.drop_claimed()

    def drop(self, keys: Sequence[Key]) -> None:
        """Forget what was asked for."""
        self._reader.drop(keys)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was put is on disk; return whether it was, within `timeout` seconds."""
        return self._disk is None or self._disk.writer.flush(timeout)

    def distrust(self, key: Key) -> None:
        """Delete an entry that was whole and is of another form, and take no other one from before."""
        self._host.forget_all()
        if self._disk is not None:
            with suppress(OSError):
                self._disk.folder.path_of(key).unlink()
            self._disk.folder.forget_all()

    def put(self, entry: Entry) -> bool:
        """Keep an entry, and queue it to be written; return False if the queue is full."""
        if self._host.max_bytes:
            self._host.add(entry)
        return self._disk is None or self._disk.writer.put(self._disk.folder, self.stats, entry)

    def close(self) -> None:
        """End the reader; what is queued is written nevertheless."""
        self._reader.close()
        if self._disk is not None:
            self._disk.close()

"""The store of a server, which is a folder and a thread that writes, and those of its models."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

from batching.block_store.entry_file import Entry
from batching.block_store.folder import ModelFolder, StoreFolder
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
    folder: Path, max_bytes: int, max_written_a_day: int | None, identity: str
) -> "BlockStore":
    """Return the store of a model in a folder, which the first model of this process opens and the last one closes.

    Raises:
        OSError: it cannot be used, or another user can change it.
    """
    with _lock:
        key = folder.resolve()
        server = _shared.get(key) or ServerStore(key, max_bytes, max_written_a_day)
        opened = server.open(identity)
        _shared[key] = server
    # There may be many files.
    opened.load()
    return BlockStore(server, opened, server.writer)


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
    def num_bytes(self) -> int:
        """The size of the folder, as far as it is known."""
        return self._folder.num_bytes

    @property
    def written_today(self) -> int:
        return self._limit.num_bytes

    @property
    def writer(self) -> WriteBehind:
        assert self._writer is not None, "a model is open"
        return self._writer

    def open(self, identity: str) -> ModelFolder:
        """Return the folder of the model with this identity.

        Raises:
            OSError: it cannot be made.
        """
        folder = self._folder.open(identity)
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


class BlockStore:
    """The entries of one model on disk: which there are, reading and writing them.

    The thread of the engine asks; two others read and write.
    """

    def __init__(self, server: ServerStore, folder: ModelFolder, writer: WriteBehind) -> None:
        self.stats: Final = StoreStats()
        self._server = server
        self._folder = folder
        self._writer = writer
        self._reader = ReadAhead(folder, self.stats)

    def call_when_read(self, func: Callable[[], None]) -> None:
        """Set what is called, in a thread, when something that was fetched is there, or is lost."""
        self._reader.call_when_read(func)

    def has(self, key: Key) -> bool:
        return key in self._folder

    @property
    def num_entries(self) -> int:
        return len(self._folder)

    @property
    def num_bytes(self) -> int:
        return self._folder.num_bytes

    def size_of(self, key: Key) -> int:
        return self._folder.size_of(key)

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

    def distrust(self, key: Key) -> None:
        """Delete an entry that was whole and is of another form, and take no other one from before."""
        with suppress(OSError):
            self._folder.path_of(key).unlink()
        self._folder.forget_all()

    def put(self, entry: Entry) -> bool:
        """Queue an entry to be written; return False if the queue is full."""
        return self._writer.put(self._folder, self.stats, entry)

    def close(self) -> None:
        """End the reader; what is queued is written nevertheless."""
        self._reader.close()
        self._server.leave(self._folder)

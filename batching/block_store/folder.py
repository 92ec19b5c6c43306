"""The folder of a store: its files by model, their least recently used ones make room."""

import fcntl
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from batching.block_manager import BlockHash
from batching.block_store.keys import Key, Kind
from batching.block_store.model_note import write_note
from batching.host.private_files import check_folder

logger = logging.getLogger(__name__)

LOCK: Final = "lock"
# Such a share of what may be deleted goes besides, so that room is not looked for with each file.
_SPARE: Final = 0.05
# Files of other servers are counted again after so many bytes of one's own.
_RECOUNT_SHARE: Final = 0.01
_LEAST_RECOUNT: Final = 1 << 28
# Space that is left on a disk for others: a share of it, or so many bytes if these are fewer.
_FREE_SHARE: Final = 0.05
_FREE_BYTES: Final = 8 << 30

# Files may be retained for so long, in nanoseconds.  Who has a later time was used by a clock that was ahead.
_MAX_RETENTION: Final = 25 * 3600 * 10**9
# A file is marked as used so often at most, and in a prefix each one so much before the next.
_MARK_INTERVAL: Final = 60 * 10**9
_BETWEEN_BLOCKS: Final = 1000

# Of files that this process has written.
_numbers: Final = count()


class NoRoom(Exception):
    """A file may not be written; the text says why."""


class StoredFile(NamedTuple):
    """A file in a store; `used` is in nanoseconds of Unix, and in the future while it is retained."""

    used: int
    size: int
    path: Path


class StoreFolder:
    """All files of a folder, which several servers may use; one thread of a server writes.

    `<identity>/<hh>/<hash>.<kind>`: a model has a folder, by what its keys and values depend on, and a lock in it that
    each server holds while the model is loaded.  The least recently used files of one's own models and of those that
    no server has loaded make room; those of models that only others have loaded stay, and so do files of another name.

    What it counts is a little old where several servers write.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Make the folder if it is not there.

        Raises:
            OSError: it cannot be used, or others can change it.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(folder)
        self.folder: Final = folder
        self.max_bytes: Final = max_bytes
        self._models: dict[str, ModelFolder] = {}
        self._num_users: Counter[str] = Counter()
        self._num_bytes: int | None = None
        self._num_written = 0

    @property
    def num_bytes(self) -> int:
        """The size of all files, as far as it is known."""
        return self._num_bytes or 0

    def open(self, identity: str, model_id: str = "") -> "ModelFolder":
        """Return the folder of a model, the same for all its users; its id is for those who list it.

        It is in use until it was closed as often.
        """
        model = self._models.get(identity)
        if model is None:
            model = self._models[identity] = ModelFolder(self.folder / identity)
        self._num_users[identity] += 1
        if model_id:
            write_note(self.folder / identity, model_id)
        return model

    def close(self, model: "ModelFolder") -> None:
        self._num_users[model.identity] -= 1
        if not self._num_users[model.identity]:
            del self._num_users[model.identity], self._models[model.identity]
            model.close()

    def make_room(self, num_bytes: int) -> None:
        """Delete files so that another one may be written.

        Raises:
            NoRoom: there are too few that may be deleted; those stay.
            OSError: the folder is gone, or a file cannot be deleted.
        """
        total = self._counted()
        if total + num_bytes > self.max_bytes:
            # Others may have written or deleted since.
            total = self._count()
        if not self._delete(total + num_bytes - self.max_bytes):
            raise NoRoom("the files that are in use, or of others, leave no room")
        disk = shutil.disk_usage(self.folder)
        missing = int(min(_FREE_SHARE * disk.total, _FREE_BYTES)) + num_bytes - disk.free
        if not self._delete(missing):
            raise NoRoom(f"the disk is nearly full: {disk.free >> 20} MiB are free")

    def add(self, num_bytes: int) -> None:
        """Count a file that was written."""
        self._num_bytes = self.num_bytes + num_bytes
        self._num_written += num_bytes

    def _counted(self) -> int:
        limit = max(_LEAST_RECOUNT, int(self.max_bytes * _RECOUNT_SHARE))
        if self._num_bytes is None or self._num_written > limit:
            return self._count()
        return self._num_bytes

    def _count(self) -> int:
        self._num_bytes = sum(file.size for file in files_in(self.folder))
        self._num_written = 0
        return self._num_bytes

    def _delete(self, num_bytes: int) -> bool:
        """Delete files of so many bytes and some more, and none if there are not as many that may be; return whether."""
        if num_bytes <= 0:
            return True
        latest = time.time_ns() + _MAX_RETENTION
        files = sorted(self._deletable(), key=lambda f: (f.used <= latest, f))
        most = sum(file.size for file in files)
        if most < num_bytes:
            return False
        wanted, num_deleted = num_bytes + int(most * _SPARE), 0
        for file in files:
            if num_deleted >= wanted:
                break
            with suppress(FileNotFoundError):
                file.path.unlink()
            num_deleted += file.size
            own = self._models.get(file.path.parent.parent.name)
            if own is not None and (key := Key.of_name(file.path.name)) is not None:
                own.forget(key)
        self._num_bytes = self.num_bytes - num_deleted
        return True

    def _deletable(self) -> Iterator[StoredFile]:
        for folder in model_folders(self.folder):
            is_own = folder.name in self._models
            if is_own or is_unused(folder):
                for file in files_in(folder):
                    name = file.path.name
                    if Key.of_name(name) is not None or (not is_own and _is_part(name)):
                        yield file


class ModelFolder:
    """The files of one model, by their keys; it is in use until it is closed.

    Any thread may use it.  What killed servers have left of files that they were writing is deleted, unless another one
    has the model loaded, which may be writing.

    A file that is retained was used, by its time, when that is over.

    num_bytes: the size of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.identity: Final = folder.name
        self._folder = folder
        self._changes = threading.Lock()
        self._sizes: dict[Key, int] = {}
        self._kinds: tuple[Kind, ...] = ()
        # The times that files of a prefix have, and until when prefixes are retained, in nanoseconds of Unix.
        self._used: dict[BlockHash, int] = {}
        self._retained: dict[BlockHash, int] = {}
        # When those that are over were forgotten.
        self._pruned = 0
        self.num_bytes = 0
        self._loading = threading.Lock()
        self._is_loaded = False
        self._lock, self._is_alone = _share_lock(folder)

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def size_of(self, key: Key) -> int:
        return self._sizes.get(key, 0)

    def path_of(self, key: Key) -> Path:
        return Path(self._place_of(key))

    def _place_of(self, key: Key) -> str:
        """Return the path of a file; to make a Path takes as long as to set a file's time."""
        name = key.name
        return f"{self._folder}/{name[:2]}/{name}"

    def load(self) -> None:
        """Find the files that are there, and what is retained of them, unless that was done."""
        with self._loading:
            if not self._is_loaded:
                self._load()
                self._is_loaded = True

    def _load(self) -> None:
        now = time.time_ns()
        for file in files_in(self._folder):
            if (key := Key.of_name(file.path.name)) is not None:
                self.add(key, file.size)
                if now < file.used <= now + _MAX_RETENTION:
                    self._retained[key.block_hash] = file.used
            elif self._is_alone and _is_part(file.path.name):
                with suppress(OSError):
                    file.path.unlink()

    def add(self, key: Key, num_bytes: int) -> None:
        with self._changes:
            self.num_bytes += num_bytes - self._sizes.get(key, 0)
            self._sizes[key] = num_bytes
            if key.kind not in self._kinds:
                self._kinds += (key.kind,)

    def forget(self, key: Key) -> None:
        with self._changes:
            self.num_bytes -= self._sizes.pop(key, 0)
            self._used.pop(key.block_hash, None)

    def forget_all(self) -> None:
        with self._changes:
            self._sizes.clear()
            self._used.clear()
            self.num_bytes = 0

    def mark_used(self, hashes: Sequence[BlockHash], seconds: float = 0.0) -> None:
        """Record that the blocks of a prefix are used, also in memory, until so many seconds from now.

        Files that are written later are retained as well.  The end of the prefix is deleted before its beginning.
        """
        now = time.time_ns()
        until = now + int(min(seconds * 1e9, _MAX_RETENTION))
        with self._changes:
            if now >= self._pruned + _MARK_INTERVAL:
                self._retained = {each: end for each, end in self._retained.items() if end > now}
                self._pruned = now
            if seconds:
                self._retained |= {each: max(until, self._retained.get(each, 0)) for each in hashes}
        for index, each in enumerate(hashes):
            used = max(now, self._retained.get(each, 0))
            if used > self._used.get(each, 0) + _MARK_INTERVAL:
                self._mark_all(each, used - index * _BETWEEN_BLOCKS)

    def mark_written(self, key: Key) -> None:
        """Set the time of a file that was written, if its prefix is retained."""
        if (until := self._retained.get(key.block_hash, 0)) > time.time_ns():
            self._mark(key, until)

    def end_retention(self, hashes: Sequence[BlockHash]) -> None:
        """Delete the files of these prefixes as if they were used now, and no later."""
        now = time.time_ns()
        for each in hashes:
            self._retained.pop(each, None)
            self._mark_all(each, now)

    def _mark_all(self, block_hash: BlockHash, used: int) -> None:
        for kind in self._kinds:
            if (key := Key(kind, block_hash)) in self._sizes:
                self._mark(key, used)

    def _mark(self, key: Key, used: int) -> None:
        self._used[key.block_hash] = used
        with suppress(OSError):
            os.utime(self._place_of(key), ns=(used, used))

    def close(self) -> None:
        os.close(self._lock)


def _share_lock(folder: Path) -> tuple[int, bool]:
    """Make the folder of a model and return its lock, which is shared with other servers, and whether there are none."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_alone = _try_lock(lock)
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError:
            os.close(lock)
            raise
        if os.fstat(lock).st_nlink:
            return lock, is_alone
        # Who held it has deleted the folder.
        os.close(lock)


def lock_unused(folder: Path) -> int | None:
    """Return the lock of a model that no server has loaded; none does until it is closed.  None if one has."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if _try_lock(lock):
        return lock
    os.close(lock)
    return None


def is_unused(folder: Path) -> bool:
    """Return whether no server has this model loaded."""
    lock = lock_unused(folder)
    if lock is not None:
        os.close(lock)
    return lock is not None


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def part_of(path: Path) -> Path:
    """Return the name under which a file is written."""
    return path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}")


def _is_part(name: str) -> bool:
    """Return whether a file is being written, or was."""
    return name[:1] == "." and Key.of_name(Path(name[1:]).stem) is not None


def entries_in(folder: Path) -> Iterator[StoredFile]:
    """Yield the files of a model that are the store's."""
    return (file for file in files_in(folder) if Key.of_name(file.path.name) is not None)


def files_in(folder: Path) -> Iterator[StoredFile]:
    """Yield all files in a folder; what is deleted meanwhile is left out, and what may not be looked into."""
    with suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if each.is_dir(follow_symlinks=False):
                yield from files_in(Path(each.path))
                continue
            with suppress(OSError):
                stat = each.stat(follow_symlinks=False)
                yield StoredFile(stat.st_mtime_ns, stat.st_size, Path(each.path))


def model_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of a store's models; others have no lock."""
    with suppress(OSError), os.scandir(folder) as found:
        folders = [Path(each.path) for each in found if each.is_dir(follow_symlinks=False)]
        yield from (path for path in sorted(folders) if (path / LOCK).is_file())

"""Everything that outlives a request: responses, files, batches, and the key of sealed values."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from app.storage.batch_storage import DEFAULT_LIMITS, BatchStorage
from app.storage.disk.folder_lock import FolderLock
from app.storage.files import FileLimits
from app.storage.responses.limits import StoreLimits
from app.storage.responses.store import ResponseStore
from app.storage.seal import Sealer, load_key

_BATCHES: Final = "batches"


@dataclass(frozen=True, slots=True)
class Storage:
    """The stores of a server; by default in memory, so that all is lost at a restart."""

    responses: ResponseStore = field(default_factory=ResponseStore)
    sealer: Sealer = field(default_factory=lambda: Sealer(load_key(None)))
    batch: BatchStorage = field(default_factory=BatchStorage)
    lock: FolderLock | None = None

    def close(self) -> None:
        self.responses.close()
        self.batch.close()
        if self.lock is not None:
            self.lock.close()


def open_folder(
    folder: Path, limits: StoreLimits, *, keeps_responses: bool, files: FileLimits = DEFAULT_LIMITS
) -> Storage:
    """Open the stores of a folder, which is created if necessary.

    keeps_responses: keep responses in the folder; otherwise they are kept in memory.

    Raises:
        FolderInUse: another server uses the folder.
        OSError: the folder or a file in it cannot be read or written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as opened:
        lock = FolderLock(folder)
        opened.callback(lock.close)
        sealer = Sealer(load_key(folder))
        responses = ResponseStore(limits, folder if keeps_responses else None)
        opened.callback(responses.close)
        storage = Storage(responses, sealer, BatchStorage(files, folder / _BATCHES), lock)
        opened.pop_all()
    return storage

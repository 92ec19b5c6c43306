"""Everything that outlives a request: responses, files, batches, and the key of sealed values."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from app.storage.batch_storage import DEFAULT_LIMITS, BatchStorage
from app.storage.files import FileLimits
from app.storage.responses import ResponseStore, StoreLimits
from app.storage.seal import Sealer, load_key

_BATCHES: Final = "batches"


@dataclass(frozen=True, slots=True)
class Storage:
    """The stores of a server; by default in memory, so that all is lost at a restart."""

    responses: ResponseStore = field(default_factory=ResponseStore)
    sealer: Sealer = field(default_factory=lambda: Sealer(load_key(None)))
    batch: BatchStorage = field(default_factory=BatchStorage)

    def close(self) -> None:
        self.responses.close()
        self.batch.close()


def open_storage(
    folder: Path,
    limits: StoreLimits,
    *,
    keeps_responses: bool,
    files: FileLimits = DEFAULT_LIMITS,
) -> Storage:
    """Open the stores of a folder, which is created if necessary.

    keeps_responses: keep responses in the folder; otherwise they are kept in memory.

    Raises:
        OSError: the folder or a file in it cannot be read or written.
    """
    sealer = Sealer(load_key(folder))
    responses = ResponseStore(limits, folder if keeps_responses else None)
    try:
        return Storage(responses, sealer, BatchStorage(files, folder / _BATCHES))
    except OSError:
        responses.close()
        raise

"""Makes the files of a batch from its results."""

from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from app.batches.work import WorkFile
from app.storage.batches import StoredBatch
from app.storage.disk.in_thread import Pieces
from app.storage.files import FileStore, StoredFile

_PURPOSE: Final = "batch_output"
# Bytes that are written at once.
_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The output and error files of a batch; None if no line has such a result."""

    output: StoredFile | None
    errors: StoredFile | None

    @property
    def all(self) -> list[StoredFile]:
        return [file for file in (self.output, self.errors) if file is not None]


def write_files(
    batch: StoredBatch, work: WorkFile, files: FileStore, now: int
) -> Pieces[BatchFiles]:
    """Write the output and error files to disk; the caller adds them to the store.

    Their ids are derived from that of the batch, so that writing them again replaces them.

    Raises:
        OSError: a file cannot be written.
    """
    output = yield from _write(batch, work, files, now, is_error=False)
    errors = yield from _write(batch, work, files, now, is_error=True)
    return BatchFiles(output, errors)


def _write(
    batch: StoredBatch, work: WorkFile, files: FileStore, now: int, *, is_error: bool
) -> Pieces[StoredFile | None]:
    kind = "error" if is_error else "output"
    file_id = f"file-{sha256(f'{batch.id} {kind}'.encode()).hexdigest()[:24]}"
    draft = files.begin_output()
    try:
        with closing(work.records(is_error=is_error)) as records:
            num_written = 0
            for record in records:
                draft.write(record + b"\n")
                if draft.num_bytes - num_written >= _PIECE:
                    num_written = draft.num_bytes
                    yield
        if not draft.num_bytes:
            return None
        files.end(draft, file_id)
    finally:
        files.discard(draft)
    expires = None if batch.output_ttl is None else now + batch.output_ttl
    name = f"{batch.id}_{kind}.jsonl"
    return StoredFile(file_id, batch.owner, _PURPOSE, name, draft.num_bytes, now, expires)

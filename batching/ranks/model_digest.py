"""A digest by which two machines see, within a second, whether they have the same model."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from batching.model_files.references import HUB_FILES

# Files up to this size are read whole; of larger ones a beginning, which has a header, and samples.
_WHOLE_BYTES: Final = 1 << 22
_HEAD_BYTES: Final = 1 << 20
_SAMPLE_BYTES: Final = 1 << 12
_NUM_SAMPLES: Final = 64


def model_digest(model: Path) -> str:
    """Return a digest of a model's files: their names, their sizes, and what they contain.

    A fault of a disk within a large file is not seen: that is no reason to read it all.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in _files(model):
        size = path.stat().st_size
        # A file may have any name; in a folder names count.
        name = "" if path == model else str(path.relative_to(model))
        digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        for piece in _pieces(path, size):
            digest.update(piece)
    return digest.hexdigest()[:16]


def _files(model: Path) -> Iterator[Path]:
    if model.is_file():
        yield model
        return
    yield from sorted({path for pattern in HUB_FILES for path in model.glob(pattern)})


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        if size <= _WHOLE_BYTES:
            yield os.pread(descriptor, size, 0)
            return
        yield os.pread(descriptor, _HEAD_BYTES, 0)
        last = size - _SAMPLE_BYTES
        for index in range(1, _NUM_SAMPLES + 1):
            yield os.pread(descriptor, _SAMPLE_BYTES, last * index // _NUM_SAMPLES)

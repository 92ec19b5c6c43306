"""Reads which tensors a safetensors file has, and no weights."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from batching.errors import ModelLoadError, printable
from batching.model_files.tensor import StoredTensor

_LENGTH: Final = struct.Struct("<Q")
# The format's own limit.
_MAX_HEADER_BYTES: Final = 100_000_000
_METADATA: Final = "__metadata__"


def read_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors of a file, all of which lie inside of it.

    Raises:
        ModelLoadError: it cannot be read, is damaged, or is cut off.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(size - _LENGTH.size, _MAX_HEADER_BYTES):
                raise ValueError
            header = json.loads(file.read(length))
        return list(_tensors(header, size - _LENGTH.size - length))
    except OSError as error:
        reason = error.strerror or str(error)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError):
        reason = "it is damaged or incomplete"
    raise ModelLoadError(f"cannot read {path}: {printable(reason)}")


def _tensors(header: dict[str, Any], room: int) -> Iterator[StoredTensor]:
    for name, entry in header.items():
        if name == _METADATA:
            continue
        start, stop = entry["data_offsets"]
        if not 0 <= start <= stop <= room:
            raise ValueError
        shape = tuple(map(int, entry["shape"]))
        yield StoredTensor(name, str(entry["dtype"]), shape, stop - start)

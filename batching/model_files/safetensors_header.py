"""Reads which tensors a safetensors file has, and no weights."""

import os
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

from batching.errors import ModelLoadError, printable
from batching.model_files.strict_json import read_object
from batching.model_files.tensor import StoredTensor

_LENGTH: Final = struct.Struct("<Q")
# The format's own limit.
_MAX_HEADER_BYTES: Final = 100_000_000
_METADATA: Final = "__metadata__"


class PlacedTensor(NamedTuple):
    """A tensor and where its bytes begin in the file."""

    tensor: StoredTensor
    start: int


def read_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors of a file, all of which lie inside of it.

    Raises:
        ModelLoadError: it cannot be read, is damaged, or is cut off.
    """
    try:
        with path.open("rb") as file:
            return [placed.tensor for placed in read_placed(file.fileno())]
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:
        reason = "it is damaged or incomplete"
    raise ModelLoadError(f"cannot read {path}: {printable(reason)}")


def read_placed(descriptor: int, max_header: int = _MAX_HEADER_BYTES) -> list[PlacedTensor]:
    """Return the tensors of an open file in the order of its header; all lie inside of it.

    max_header: the most bytes of a header; a longer one is not read.

    Raises:
        ValueError: it is damaged or cut off; the text says how, and follows the file's name.
        OSError: it cannot be read.
    """
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, _LENGTH.size, 0)
    if len(head) < _LENGTH.size:
        raise ValueError("is too short for a safetensors file")
    (length,) = _LENGTH.unpack(head)
    if length > max_header:
        raise ValueError(f"has a header of {length} bytes; the limit is {max_header}")
    start = _LENGTH.size + length
    if start > size:
        raise ValueError(f"is cut off within its header of {length} bytes")
    try:
        header = read_object(os.pread(descriptor, length, _LENGTH.size))
    except ValueError as error:
        raise ValueError(f"has a header that {error}") from None
    return [
        _placed(name, entry, start, size - start)
        for name, entry in header.items()
        if name != _METADATA
    ]


def _placed(name: str, entry: Any, data: int, room: int) -> PlacedTensor:
    """data, room: where the data of all tensors begins in the file, and its bytes."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]} if _are_sizes(
            [*shape, start, stop]
        ):
            if not start <= stop <= room:
                raise ValueError(f"has {printable(name)} outside of its {room} bytes of data")
            return PlacedTensor(StoredTensor(name, dtype, tuple(shape), stop - start), data + start)
    raise ValueError(f"has {printable(name)} without a dtype, a shape and offsets")


def _are_sizes(numbers: list[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)

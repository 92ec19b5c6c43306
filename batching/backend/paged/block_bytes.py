"""Keys and values of a block as bytes, bit by bit, and back."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np


class WrongBlock(ValueError):
    """The bytes are not those of a block of this pool."""


def bytes_of(arrays: Sequence[mx.array]) -> bytes:
    """Return the contents of arrays, one behind the other."""
    return b"".join(np.array(_as_bytes(array)).tobytes() for array in arrays if array.size)


def arrays_of(data: bytes, like: Sequence[mx.array]) -> list[mx.array]:
    """Return the arrays that `bytes_of` has written, of the shapes and types of others.

    Raises:
        WrongBlock: they have another size.
    """
    if len(data) != (expected := sum(array.nbytes for array in like)):
        raise WrongBlock(f"a block of this layer has {expected} bytes, not {len(data)}")
    made: list[mx.array] = []
    start = 0
    for array in like:
        part = np.frombuffer(data, np.uint8, array.nbytes, start)
        start += array.nbytes
        made.append(mx.array(part).view(array.dtype).reshape(array.shape) if part.size else array)
    return made


def _as_bytes(array: mx.array) -> mx.array:
    return mx.contiguous(array).flatten().view(mx.uint8)

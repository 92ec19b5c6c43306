"""Keys and values of a block, and states, as bytes, bit by bit, and back."""

import json
from collections.abc import Sequence

import mlx.core as mx
import numpy as np


class WrongBlock(ValueError):
    """The bytes are not those of a block of this pool."""


def bytes_of(arrays: Sequence[mx.array]) -> bytes:
    """Return the contents of arrays, one behind the other."""
    return b"".join(np.array(_as_bytes(array)).tobytes() for array in arrays if array.size)


def arrays_of(data: bytes | memoryview, like: Sequence[mx.array]) -> list[mx.array]:
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


def packed_arrays(arrays: Sequence[mx.array | None]) -> bytes:
    """Return arrays of any shapes as bytes that `unpacked_arrays` reads: a line of JSON, and the contents."""
    described = [None if a is None else [_name(a.dtype), a.shape] for a in arrays]
    return json.dumps(described).encode() + b"\n" + bytes_of([a for a in arrays if a is not None])


def unpacked_arrays(data: bytes) -> list[mx.array | None]:
    """Return what `packed_arrays` has written.

    Raises:
        WrongBlock: it is of another form.
    """
    line, _, data = data.partition(b"\n")
    found: list[mx.array | None] = []
    try:
        for each in json.loads(line):
            if each is None:
                found.append(None)
                continue
            name, shape = each
            like = mx.zeros(shape, getattr(mx, name))
            found += arrays_of(data[: like.nbytes], [like])
            data = data[like.nbytes :]
    except (ValueError, TypeError, AttributeError) as error:
        raise WrongBlock(f"no arrays: {error}") from None
    return found


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _as_bytes(array: mx.array) -> mx.array:
    return mx.contiguous(array).flatten().view(mx.uint8)

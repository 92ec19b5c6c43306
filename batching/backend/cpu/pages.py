"""Memory of the system for arrays that are too large to wait for."""

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from threading import Thread, get_native_id
from typing import Final, NamedTuple

import numpy as np

from batching.backend.cpu.attention import Floats

# madvise(2), Linux 5.14: back these pages, and leave what is in them.
_MADV_POPULATE_WRITE: Final = 23
_PIECE_BYTES: Final = 1 << 18


def untouched(shape: tuple[int, ...]) -> Floats:
    """Return zeros of memory that the system clears as it is touched: starting costs nothing.

    `numpy.zeros` clears what the allocator kept, page by page.
    """
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(np.float32).itemsize)
    return np.frombuffer(memory, np.float32).reshape(shape)


class Region(NamedTuple):
    """Memory, of which the beginning is used first."""

    address: int
    size: int

    @classmethod
    def of(cls, array: Floats) -> "Region":
        return cls(array.ctypes.data, array.nbytes)


def back_with_memory(regions: Sequence[Region], owners: Sequence[object]) -> None:
    """Have regions of some owners backed by memory soon, the beginnings of all first.

    A thread of the lowest priority does it.  Else the first tokens of every block would wait
    for it: reading a prompt takes a sixth longer in a virtual machine, where a page costs
    2 to 13 microseconds.  Where the system has no such call, that is how it stays.
    """
    if sys.platform == "linux":
        # The thread holds the owners: what they free could be somebody else's at once.
        Thread(target=_back, args=(regions, owners), name="kv-pool-pages", daemon=True).start()


def _back(regions: Sequence[Region], _owners: Sequence[object]) -> None:
    os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
    # By ctypes, since `mmap.madvise` keeps the interpreter's lock.
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, size in _pieces(regions):
        if madvise(start, size, _MADV_POPULATE_WRITE) != 0:
            return


def _pieces(regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """Yield addresses and sizes of whole pages: a piece of every region, then the next of each."""
    for offset in range(0, max(size for _, size in regions), _PIECE_BYTES):
        for address, size in regions:
            start, stop = address + offset, address + min(offset + _PIECE_BYTES, size)
            if start < stop:
                yield start - start % mmap.PAGESIZE, stop - start + start % mmap.PAGESIZE

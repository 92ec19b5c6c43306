"""The pages of the pool."""

import ctypes
import mmap
import sys
import threading

import numpy as np
import pytest

from batching.backend.cpu.attention import Floats
from batching.backend.cpu.pages import Region, lazy_zeros, prefault


def num_resident_pages(array: Floats) -> int:
    residency = (ctypes.c_ubyte * -(-array.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(array.ctypes.data, array.nbytes, residency) == 0
    return sum(page & 1 for page in residency)


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_all_pages_are_backed_and_nothing_in_them_changes() -> None:
    # A head is no whole number of pieces, nor of pages.
    arrays = [lazy_zeros((2, 1500, 64)), lazy_zeros((3, 1500, 33))]
    arrays[0][1, 700:800] = 7
    assert num_resident_pages(arrays[1]) == 0
    prefault([Region.of(head) for array in arrays for head in array], arrays)
    for thread in threading.enumerate():
        if thread.name == "kv-pool-pages":
            thread.join()
    assert all(num_resident_pages(a) == -(-a.nbytes // mmap.PAGESIZE) for a in arrays)
    assert np.count_nonzero(arrays[0]) == 100 * 64
    assert (arrays[0][1, 700:800] == 7).all()

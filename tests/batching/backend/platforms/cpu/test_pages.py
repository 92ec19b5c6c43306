"""The pages of the pool."""

import ctypes
import math
import mmap
import os
import sys
import threading
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pytest

from batching.backend.platforms.cpu.pools.pages import PoolPages, Region, prefault

Floats = npt.NDArray[np.float32]


def lazy_zeros(shape: tuple[int, ...]) -> Floats:
    """Return zeros whose pages the system clears when first touched."""
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(np.float32).itemsize)
    return np.frombuffer(memory, np.float32).reshape(shape)


def num_resident_pages(array: Floats) -> int:
    residency = (ctypes.c_ubyte * -(-array.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(array.ctypes.data, array.nbytes, residency) == 0
    return sum(page & 1 for page in residency)


def wait_for_prefault() -> None:
    for thread in threading.enumerate():
        if thread.name == "kv-pool-pages":
            thread.join()


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")


@on_linux
def test_all_pages_are_backed_and_nothing_in_them_changes() -> None:
    # A head is no whole number of pieces, nor of pages.
    arrays = [lazy_zeros((2, 1500, 64)), lazy_zeros((3, 1500, 33))]
    arrays[0][1, 700:800] = 7
    assert num_resident_pages(arrays[1]) == 0
    prefault([Region.of(head) for array in arrays for head in array], arrays)
    wait_for_prefault()
    assert all(num_resident_pages(a) == -(-a.nbytes // mmap.PAGESIZE) for a in arrays)
    assert np.count_nonzero(arrays[0]) == 100 * 64
    assert (arrays[0][1, 700:800] == 7).all()


@on_linux
def test_numa_nodes_take_turns_at_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, processors: chosen.append(processors))
    array = lazy_zeros((8 << 20,))
    prefault([Region.of(array)], [array], nodes=((0,), (1,)))
    wait_for_prefault()
    assert num_resident_pages(array) == -(-array.nbytes // mmap.PAGESIZE)
    turns = [processors for processors, _ in groupby(chosen)]
    assert len(turns) in (16, 17)
    assert set(chosen) == {(0,), (1,)}


@on_linux
def test_a_node_whose_processors_are_gone_leaves_the_pages_to_another() -> None:
    array = lazy_zeros((1 << 20,))
    prefault([Region.of(array)], [array], nodes=((1 << 16,),))
    wait_for_prefault()
    assert num_resident_pages(array) == -(-array.nbytes // mmap.PAGESIZE)


@on_linux
def test_a_pool_is_prefaulted_as_it_is_used() -> None:
    """Two heads, of which a block is a page each."""
    array = lazy_zeros((2, 1000, mmap.PAGESIZE // 4))
    pages = PoolPages([Region.of(head) for head in array], [array], num_blocks=1000)
    for block_id, num_prefaulted in [(0, 64), (31, 64), (32, 96), (47, 96), (48, 144), (999, 1000)]:
        pages.use(block_id)
        wait_for_prefault()
        assert [num_resident_pages(head) for head in array] == [num_prefaulted, num_prefaulted]
    pages.use(999)
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-pool-pages"]

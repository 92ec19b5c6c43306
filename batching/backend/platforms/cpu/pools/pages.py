"""Memory for large arrays, without waiting for its pages."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Thread, get_native_id
from typing import Final, NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from batching.backend.memory.device import count_too
from batching.backend.processor.cores import Nodes

# madvise(2), Linux 5.14: fault in these pages without changing their contents.
_MADV_POPULATE_WRITE: Final = 23
_PIECE_BYTES: Final = 1 << 18
# Bytes that are taken in turn from each NUMA node's memory: a large page.
_NODE_BYTES: Final = 1 << 21
# Blocks that are prefaulted before there is a request.
_MIN_PREFAULTED: Final = 64


class Region(NamedTuple):
    """Memory whose beginning is used first."""

    address: int
    size: int

    @classmethod
    def of(cls, array: npt.NDArray[np.float32]) -> "Region":
        return cls(array.ctypes.data, array.nbytes)

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def write(self, data: bytes | memoryview) -> None:
        """`data` is as long as the region."""
        source = np.frombuffer(data, np.uint8)
        ctypes.memmove(self.address, source.ctypes.data, self.size)


class PoolPages:
    """Prefaults a pool ahead of its use, and nothing of what is not used.

    Otherwise the first tokens of every block wait for page faults: prefill takes a sixth longer in
    a virtual machine, where a page costs 2 to 13 microseconds.  At least as many blocks are
    ahead as are in use, so that a pool which fills quickly is prefaulted in few parts.

    A page is in the memory of the NUMA node that touches it first.  Any thread may attend to any
    block, so if the threads are divided among nodes, the pages are as well.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        owners: Sequence[object],
        num_blocks: int,
        nodes: Nodes = (),
    ) -> None:
        """Each region holds a share of every block, in the order of their numbers."""
        self._regions = regions
        self._owners = owners
        self._nodes = nodes
        self._num_blocks = num_blocks
        self._num_prefaulted = 0
        _pools.add(self)
        self.use(0)

    @property
    def num_bytes(self) -> int:
        return sum(region.size for region in self._regions)

    def use(self, block_id: int) -> None:
        """Prefault a block and what is ahead of it."""
        first = self._num_prefaulted
        if first == self._num_blocks or block_id < first // 2:
            return
        self._num_prefaulted = min(self._num_blocks, max(_MIN_PREFAULTED, 3 * block_id))
        parts = [self._part(region, first, self._num_prefaulted) for region in self._regions]
        prefault(parts, self._owners, self._nodes)

    def _part(self, region: Region, first: int, stop: int) -> Region:
        """Return where a region holds blocks `[first, stop)`."""
        start, end = (region.size * block // self._num_blocks for block in (first, stop))
        return Region(region.address + start, end - start)


_pools: Final[WeakSet[PoolPages]] = WeakSet()
# MLX does not know this memory.
count_too("KV pools", lambda: sum(pool.num_bytes for pool in list(_pools)))


def prefault(regions: Sequence[Region], owners: Sequence[object], nodes: Nodes = ()) -> None:
    """Fault in the pages of regions in a thread of the lowest priority, their beginnings first.

    Only Linux has such a call.
    """
    if sys.platform == "linux":
        # The thread keeps the owners alive: memory that they free may be reused at once.
        args = (regions, owners, nodes)
        Thread(target=_prefault, args=args, name="kv-pool-pages", daemon=True).start()


def _prefault(regions: Sequence[Region], _owners: Sequence[object], nodes: Nodes) -> None:
    os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
    # By ctypes, since `mmap.madvise` does not release the interpreter's lock.
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, size in _pieces(regions):
        if nodes:
            with suppress(OSError):  # a processor may have been taken away
                os.sched_setaffinity(0, nodes[start // _NODE_BYTES % len(nodes)])
        if madvise(start, size, _MADV_POPULATE_WRITE) != 0:
            return


def _pieces(regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """Yield addresses and sizes of whole pages: a piece of every region, then the next of each."""
    for offset in range(0, max((size for _, size in regions), default=0), _PIECE_BYTES):
        for address, size in regions:
            start, stop = address + offset, address + min(offset + _PIECE_BYTES, size)
            if start < stop:
                yield start - start % mmap.PAGESIZE, stop - start + start % mmap.PAGESIZE

"""The prefixes of admitted requests that are read from the store, block by block, instead of being computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from batching.block_store.keys import Fetch, Key
from batching.kv_cache.stored_blocks import StoredBlocks
from batching.request import BatchRequest

# Bytes that are read ahead for each request, and at least so many entries.
_READ_AHEAD: Final = 32 << 20
_LEAST_AHEAD: Final = 2


@dataclass
class Restore:
    """What is restored of a request.

    blocks: the entries of its blocks from index `first` on, in their order.
    others: what belongs to the end of these: blocks of sliding-window layers, and a recurrent state.  Without them a
        request could not go on there, so that they are restored together.
    num_done: how many of the blocks are in the pool, or on their way there.
    """

    first: int
    blocks: Sequence[Key]
    others: Sequence[Key] = ()
    num_done: int = 0

    @property
    def stop(self) -> int:
        """The index behind the last block."""
        return self.first + len(self.blocks)

    @property
    def left(self) -> Sequence[Key]:
        """What is not in the pool yet."""
        return [*self.blocks[self.num_done :], *self.others]


class RestoredPrefixes:
    """What the admitted requests wait for that is in the store.

    Entries are read ahead, as many as a step or two may need, and what a request that leaves has asked for is
    forgotten.
    """

    def __init__(self, stored: StoredBlocks) -> None:
        self._stored = stored
        self._restores: dict[int, Restore] = {}

    def begin(self, request: BatchRequest, restore: Restore) -> None:
        self._restores[request.request_id] = restore
        self._read_ahead(restore)

    def of(self, request: BatchRequest) -> Restore | None:
        """Return what is being restored of a request; None if nothing is."""
        return self._restores.get(request.request_id)

    def end(self, request: BatchRequest) -> None:
        """Forget a request that has all, goes on without the rest, or leaves; and what it has asked for."""
        restore = self._restores.pop(request.request_id, None)
        if restore is not None:
            self._stored.drop(restore.left)

    def take_blocks(self, restore: Restore, max_bytes: float) -> list[Key]:
        """Return the blocks that go to the pool now: those that were read, in at most so many bytes, or one."""
        ready: list[Key] = []
        for key in restore.blocks[restore.num_done :]:
            max_bytes -= self._stored.size_of(key)
            if (ready and max_bytes < 0) or self._stored.state_of(key) is not Fetch.READY:
                break
            ready.append(key)
        self._stored.claim(ready)
        restore.num_done += len(ready)
        self._read_ahead(restore)
        return ready

    def take_others(self, restore: Restore) -> None:
        """Let what belongs to the end of the blocks go to the pool now."""
        self._stored.claim(restore.others)

    def has_others(self, restore: Restore) -> bool:
        """Return whether what belongs to the end of the blocks was read."""
        return all(self._stored.state_of(key) is Fetch.READY for key in restore.others)

    def is_lost(self, restore: Restore) -> bool:
        """Return whether the next block, or what belongs to the end, cannot be read."""
        due = [*restore.blocks[restore.num_done :][:1], *restore.others]
        return any(self._stored.state_of(key) is Fetch.LOST for key in due)

    def _read_ahead(self, restore: Restore) -> None:
        left = restore.left
        if left:
            num = max(_LEAST_AHEAD, _READ_AHEAD // max(1, self._stored.size_of(left[0])))
            if num > len(left) - len(restore.others):
                num = len(left)
            self._stored.fetch(left[:num])

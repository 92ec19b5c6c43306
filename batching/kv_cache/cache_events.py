"""What those learn of the prefix cache who route requests by it: blocks stored and removed, and all cleared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from batching.block_manager import BlockHash, PagedBlockManager
from batching.request import BatchRequest

# Of a block's hash: what consumers of events take.
_HASH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of a prompt that requests can share from now on.

    hashes: 64 bits of each block's hash, unsigned.
    parent: the same of the block before them; None if they begin the prompt.
    token_ids: those of all the blocks.
    block_size: tokens in a block.
    """

    hashes: list[int]
    parent: int | None
    token_ids: list[int]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are in the pool no longer, by the same hashes; the store may have them."""

    hashes: list[int]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The pool has no blocks any more that could be shared."""


CacheEvent = BlocksStored | BlocksRemoved | AllBlocksCleared
# Called in the MLX thread, so that it must not wait.
CacheEventSink = Callable[[Sequence[CacheEvent]], None]


class CacheEventLog:
    """Records which blocks of the pool become findable, and which are evicted, until that is taken.

    Only blocks that any request can share whose tokens are known: none with a salt, whose owner shares it with none; none
    computed with an adapter, since a removal does not name it; and from the first row of an image on none.  Who applies
    all events has exactly these of the pool after each step: tests/batching/kv_cache/test_cache_events.py.
    """

    def __init__(self, block_manager: PagedBlockManager) -> None:
        self._block_manager = block_manager
        self._known: set[BlockHash] = set()
        self._events: list[CacheEvent] = []
        block_manager.on_evict = self._remove

    def store(
        self, request: BatchRequest, hashes: Sequence[BlockHash], first: int, stop: int
    ) -> None:
        """Record blocks `[first, stop)` of a request, which have just been made findable."""
        if request.spec.cache_key:
            return
        size = self._block_manager.block_size
        rows = (placed.start + row for placed in request.spec.images for row in placed.image.rows)
        stop = min(stop, next(rows, stop * size) // size)
        for index in range(first, stop):
            if hashes[index] not in self._known:
                self._known.add(hashes[index])
                tokens = request.token_ids[index * size : (index + 1) * size]
                parent = _number(hashes[index - 1]) if index else None
                self._store(_number(hashes[index]), parent, tokens)

    def clear(self) -> None:
        """Record that no block is findable any more."""
        self._known.clear()
        self._events = [AllBlocksCleared()]

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call, in their order."""
        events, self._events = self._events, []
        return events

    def _store(self, number: int, parent: int | None, tokens: list[int]) -> None:
        match self._events[-1:]:
            case [BlocksStored() as last] if last.hashes[-1] == parent:
                last.hashes.append(number)
                last.token_ids.extend(tokens)
            case _:
                size = self._block_manager.block_size
                self._events.append(BlocksStored([number], parent, tokens, size))

    def _remove(self, block_hash: BlockHash) -> None:
        if block_hash not in self._known:
            return
        self._known.remove(block_hash)
        match self._events[-1:]:
            case [BlocksRemoved(hashes)]:
                hashes.append(_number(block_hash))
            case _:
                self._events.append(BlocksRemoved([_number(block_hash)]))


def _number(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[-_HASH_BYTES:])

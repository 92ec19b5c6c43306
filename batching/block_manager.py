"""Blocks of KV slots: which are referenced, which are free, and where the next one goes."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from batching.blocks.block_ages import BlockAgeRecorder, BlockAges
from batching.blocks.free_runs import FreeRuns
from batching.blocks.shared_beginnings import SharedBeginnings

BlockHash = NewType("BlockHash", bytes)


class BlockContents(NamedTuple):
    """The tokens of a block, int64, and the hash of all before it."""

    parent: BlockHash
    tokens: "array[int]"


class Run(NamedTuple):
    """`num_blocks` blocks with consecutive ids: in the pool, one contiguous stretch."""

    first_block: int
    num_blocks: int


class BlockCopy(NamedTuple):
    """The contents of `source` are to be copied to `target` before the step writes.

    is_windowed: they are blocks of the layers that see a window.
    """

    source: int
    target: int
    is_windowed: bool = False

    def __str__(self) -> str:
        return f"{self.source}>{self.target}{'w' * self.is_windowed}"


@dataclass(slots=True)
class KVBlock:
    """`block_size` KV slots.  A block with a hash can be found by it, and is full but for some with contents.

    contents: of a block that can be found by how it begins, too.
    published: when its contents became findable.
    last_used: when the last reference to it was dropped; of a cached block.
    num_hits: how many requests have begun with it, among other blocks; counted for windows only.
    """

    block_id: int
    ref_count: int = 0
    block_hash: BlockHash | None = None
    contents: BlockContents | None = None
    published: float = 0.0
    last_used: float = 0.0
    num_hits: int = 0


class BlockTable:
    """The block ids of one request in the order of its tokens, and the runs they form.

    Token position p lives in slot `block_ids[p // block_size] * block_size + p % block_size`.

    The first `num_dropped` blocks are the request's no more, and no token of theirs is visible to
    it.  The first block that it still has stands for each of them, so that what is read and then
    hidden is its own; `runs` begin behind them.
    """

    def __init__(self, block_ids: Iterable[int] = ()) -> None:
        self.block_ids: list[int] = []
        self.runs: list[Run] = []
        self.num_dropped = 0
        self.extend(block_ids)

    def __len__(self) -> int:
        return len(self.block_ids)

    def __repr__(self) -> str:
        return f"BlockTable({self.block_ids})"

    @property
    def last_block(self) -> int | None:
        return self.block_ids[-1] if self.block_ids else None

    def extend(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.block_ids.append(block_id)
            if self.runs and sum(self.runs[-1]) == block_id:
                self.runs[-1] = Run(self.runs[-1].first_block, self.runs[-1].num_blocks + 1)
            else:
                self.runs.append(Run(block_id, 1))

    @property
    def held(self) -> list[int]:
        """The blocks that are not dropped."""
        return self.block_ids[self.num_dropped :]

    def replace(self, index: int, block_id: int) -> None:
        self.block_ids[index] = block_id
        self.hold(self.num_dropped, self.held)

    def hold(self, num_dropped: int, block_ids: Sequence[int]) -> None:
        """Start over with some blocks that are dropped, and those that follow."""
        self.clear()
        self.extend(block_ids)
        self.block_ids[:0] = [*block_ids[:1]] * num_dropped
        self.num_dropped = num_dropped

    def drop(self, stop: int) -> list[int]:
        """Drop the blocks before index `stop`; return those that were not dropped before."""
        dropped = self.block_ids[self.num_dropped : stop]
        self.hold(stop, self.block_ids[stop:])
        return dropped

    def clear(self) -> None:
        self.block_ids.clear()
        self.runs.clear()
        self.num_dropped = 0


class PagedBlockManager:
    """Reference-counted blocks; unreferenced ones keep their contents until they are evicted.

    A block is in exactly one of three states, checked after every step of the state machine
    in tests/batching/test_block_manager.py:

    - in use: ref_count > 0, in that many block tables
    - cached: ref_count 0 and a hash, least recently released first in `_cached`
    - empty: ref_count 0 and no hash, in `_empty`, which knows the contiguous runs

    A hash leads to at most one block, and that block carries the hash.  A block with contents is
    one of those that follow its parent.

    Growing a table takes the block right after its last one when that is empty; a new table
    starts in the middle of the largest empty run, so that the table before it can grow, too.
    Cached blocks are evicted several at a time (`_EVICTION_SHARE` of the pool): blocks of one
    request are released together, so evicting them together gives runs and not single holes.
    Every operation is O(1) for each block concerned, whatever the size of the pool; with contents, O(log n)
    comparisons among those that follow the same parent.

    `now` is in seconds and set by the scheduler; only the ages of `take_ages` depend on it.
    """

    _EVICTION_SHARE = 1 / 64

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self.num_evictions = 0
        self.now = 0.0
        self._ages = BlockAgeRecorder()
        self._eviction_batch = max(1, int(num_blocks * self._EVICTION_SHARE))
        self._empty = FreeRuns(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[BlockHash, int] = {}
        self._by_parent: dict[BlockHash, SharedBeginnings] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference; the cached ones among them can be evicted."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without a reference that a later request may still find."""
        return len(self._cached)

    def empty_runs(self, limit: int) -> list[tuple[int, int]]:
        """Return up to `limit` runs `[start, stop)` of empty blocks."""
        return self._empty.some_runs(limit)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int] | None:
        """Take `num_blocks` blocks, each with one reference; None, and no change, if too few.

        The first one is the block that follows `after` whenever that one is empty.
        """
        if num_blocks > self.num_free_blocks:
            return None
        if num_blocks > len(self._empty):
            self._evict(max(num_blocks - len(self._empty), self._eviction_batch))
        block_ids: list[int] = []
        while len(block_ids) < num_blocks:
            block_ids += self._empty.take(num_blocks - len(block_ids), after)
            after = block_ids[-1]
        for block_id in block_ids:
            self.blocks[block_id].ref_count = 1
        return block_ids

    def increment_ref(self, block_id: int) -> None:
        """Add a reference to a block with contents: one in use, or a cached one."""
        block = self.blocks[block_id]
        assert block.ref_count or block.block_hash, f"block {block_id} is empty"
        if block.ref_count == 0:
            del self._cached[block_id]
            self._ages.reused(self.now - block.last_used)
        block.ref_count += 1

    def release(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Drop one reference each.

        The last block goes first: the tail of a prefix is worth nothing without its head,
        so the tail is the first to be evicted.

        evict_first: these go before all that are cached, as if they had been used longest ago.
        """
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is not in use"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free(block)
                if evict_first and block_id in self._cached:
                    self._cached.move_to_end(block_id, last=False)

    def touch(self, block_id: int) -> None:
        """Let a block with contents be evicted after all that are cached now."""
        self.increment_ref(block_id)
        self.release([block_id])

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block with these contents, in use or cached."""
        return self._by_hash.get(block_hash)

    def find_beginning(self, contents: BlockContents) -> tuple[int, int]:
        """Return how many tokens these contents and a block's have in common, and that block.

        It is a block with the most; `(0, -1)` if none follows the same parent.
        """
        following = self._by_parent.get(contents.parent)
        return (0, -1) if following is None else following.longest(contents.tokens)

    def publish(
        self, block_id: int, block_hash: BlockHash, contents: BlockContents | None = None
    ) -> None:
        """Make a block in use findable by its hash, and with `contents` by how it begins.

        If another block has the same contents already, that one stays findable and this one
        stays private: it is emptied when it is released.
        """
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is not in use"
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            block.published = self.now
            block.num_hits = 0
            self._by_hash[block_hash] = block_id
            if contents is not None:
                block.contents = contents
                following = self._by_parent.setdefault(contents.parent, SharedBeginnings())
                following.add(contents.tokens, block_id)

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same blocks."""
        for block_id in table.block_ids:
            self.increment_ref(block_id)
        return BlockTable(table.block_ids)

    def make_writable(self, table: BlockTable, index: int) -> BlockCopy | None:
        """Copy on write: give `table` its own block at `index` if it shares that one.

        Returns the copy the model runner must make, None if the block is not shared.

        Raises:
            NoFreeBlocks: the block is shared and none is left to copy it to.
        """
        source = table.block_ids[index]
        if self.blocks[source].ref_count == 1:
            return None
        if (taken := self.allocate(1)) is None:
            raise NoFreeBlocks
        self.release([source])
        table.replace(index, taken[0])
        return BlockCopy(source, taken[0])

    def forget_cached(self) -> None:
        """Drop all findable contents, as after a failed step."""
        self._evict(len(self._cached))
        for block in self.blocks:
            block.block_hash = block.contents = None
        self._by_hash.clear()
        self._by_parent.clear()

    def take_ages(self) -> BlockAges:
        """Return the ages of what was evicted and reused since the last time."""
        return self._ages.take()

    def _free(self, block: KVBlock) -> None:
        if block.block_hash is None:
            self._empty.put(block.block_id)
        else:
            block.last_used = self.now
            self._cached[block.block_id] = None

    def _evict(self, num_blocks: int) -> None:
        for _ in range(min(num_blocks, len(self._cached))):
            block_id, _ = self._cached.popitem(last=False)
            block = self.blocks[block_id]
            assert block.block_hash is not None
            del self._by_hash[block.block_hash]
            block.block_hash = None
            self._forget_beginning(block)
            self._ages.evicted(self.now - block.published, self.now - block.last_used)
            self._empty.put(block_id)
            self.num_evictions += 1

    def _forget_beginning(self, block: KVBlock) -> None:
        if block.contents is None:
            return
        parent, tokens = block.contents
        following = self._by_parent[parent]
        following.remove(tokens, block.block_id)
        if not following:
            del self._by_parent[parent]
        block.contents = None


class NoFreeBlocks(Exception):
    """No block is left, free or cached."""

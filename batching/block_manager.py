"""The paged block manager: which KV blocks are referenced, cached or empty, and allocation."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, NewType

from batching.blocks.block_ages import BlockAgeRecorder, BlockAges
from batching.blocks.free_runs import FreeRuns
from batching.blocks.shared_beginnings import SharedBeginnings

BlockHash = NewType("BlockHash", bytes)


class BlockContents(NamedTuple):
    """The contents of a block: its tokens (int64), and the hash of the prefix before them."""

    parent: BlockHash
    tokens: "array[int]"


class Run(NamedTuple):
    """`num_blocks` blocks with consecutive ids, which are contiguous in the pool."""

    first_block: int
    num_blocks: int


class BlockIds(NamedTuple):
    """A `BlockTable` at one moment, as a value.

    block_ids: in token order; the first `num_dropped` of them stand for blocks that were given up.
    runs: the blocks that are held, in runs of consecutive ids.
    """

    block_ids: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    num_dropped: int = 0


class BlockCopy(NamedTuple):
    """An order to copy block `source` to block `target` before the step writes.

    is_windowed: both are blocks of the pool of sliding-window layers.
    """

    source: int
    target: int
    is_windowed: bool = False

    def __str__(self) -> str:
        return f"{self.source}>{self.target}{'w' * self.is_windowed}"


@dataclass(slots=True)
class KVBlock:
    """One block of the pool: `block_size` KV slots, one per token.

    ref_count: how many block tables contain the block.
    block_hash: identifies the contents and the prefix before them; None if the block cannot be found.
        A block with a hash is full, unless it also has `contents`.
    contents: the tokens, for a block that can also be found by its first tokens.
    published: when the contents became findable, in seconds on the engine's clock.
    last_used: when a cached block lost its last reference.
    num_hits: how many requests were started at this block; counted for sliding-window layers only.
    is_retained: it is evicted behind all cached blocks that are not.
    """

    block_id: int
    ref_count: int = 0
    block_hash: BlockHash | None = None
    contents: BlockContents | None = None
    published: float = 0.0
    last_used: float = 0.0
    num_hits: int = 0
    is_retained: bool = False


class BlockTable:
    """The block ids of one request in token order, and the contiguous runs that they form.

    The token at position p is in slot `block_ids[p // block_size] * block_size + p % block_size`.

    In the table of sliding-window layers, the first `num_dropped` blocks have left the window and no
    longer belong to the request.  Their entries repeat the first block that it still holds, so that
    positions keep their index and a read that is masked out later touches only the request's own
    blocks.  `runs` covers the blocks that are held.
    """

    def __init__(self, block_ids: Iterable[int] = ()) -> None:
        self.block_ids: list[int] = []
        self.runs: list[Run] = []
        self.num_dropped = 0
        self._value: BlockIds | None = None
        self.extend(block_ids)

    def __len__(self) -> int:
        return len(self.block_ids)

    def __repr__(self) -> str:
        return f"BlockTable({self.block_ids})"

    @property
    def value(self) -> BlockIds:
        """The table as it is now.  It changes once in a block of tokens, and is made then only."""
        if self._value is None:
            self._value = BlockIds(tuple(self.block_ids), tuple(self.runs), self.num_dropped)
        return self._value

    @property
    def last_block(self) -> int | None:
        return self.block_ids[-1] if self.block_ids else None

    def extend(self, block_ids: Iterable[int]) -> None:
        self._value = None
        for block_id in block_ids:
            self.block_ids.append(block_id)
            if self.runs and sum(self.runs[-1]) == block_id:
                self.runs[-1] = Run(self.runs[-1].first_block, self.runs[-1].num_blocks + 1)
            else:
                self.runs.append(Run(block_id, 1))

    @property
    def held(self) -> list[int]:
        """The blocks that still belong to the request."""
        return self.block_ids[self.num_dropped :]

    def replace(self, index: int, block_id: int) -> None:
        """Put another block at an index, as after copy-on-write."""
        self.block_ids[index] = block_id
        self.hold(self.num_dropped, self.held)

    def hold(self, num_dropped: int, block_ids: Sequence[int]) -> None:
        """Reset the table to `num_dropped` dropped entries followed by these blocks."""
        self.clear()
        self.extend(block_ids)
        self.block_ids[:0] = [*block_ids[:1]] * num_dropped
        self.num_dropped = num_dropped
        self._value = None

    def drop(self, stop: int) -> list[int]:
        """Drop the blocks before index `stop`; return the ids that were held until now."""
        dropped = self.block_ids[self.num_dropped : stop]
        self.hold(stop, self.block_ids[stop:])
        return dropped

    def clear(self) -> None:
        self._value = None
        self.block_ids.clear()
        self.runs.clear()
        self.num_dropped = 0


class PagedBlockManager:
    """Reference-counted blocks; blocks without a reference keep their contents until they are evicted.

    A block is in exactly one of three states (checked after every step of the state machine in
    tests/batching/test_block_manager.py):

    - in use: `ref_count` > 0, and the block is in that many block tables
    - cached: `ref_count` 0 and a hash; `_cached` has these, or `_retained`, least recently released first
    - empty: `ref_count` 0 and no hash; `_empty` has these, as contiguous runs

    A hash leads to at most one block, which carries that hash.  Blocks with contents are also indexed by
    their parent's hash, to find one that shares only its first tokens with a prompt.

    Allocation prefers contiguous blocks, which attention reads faster: a table grows into the block right
    after its last one if that is empty, and a new table starts in the middle of the largest empty run, so
    that the table before it can grow as well.  Cached blocks are evicted several at a time
    (`_EVICTION_SHARE` of the pool): blocks of one request are released together, so evicting them
    together leaves runs instead of single holes.

    Each operation takes O(1) per block, whatever the size of the pool; with contents, O(log n)
    comparisons among the blocks with the same parent.

    now: seconds on the engine's clock, set by the scheduler; only the ages of `take_ages` depend on it.
    on_evict: called with the hash of each block that is evicted; None calls nothing.
    """

    _EVICTION_SHARE = 1 / 64

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self.num_evictions = 0
        self.now = 0.0
        self.on_evict: Callable[[BlockHash], None] | None = None
        self._ages = BlockAgeRecorder()
        self._eviction_batch = max(1, int(num_blocks * self._EVICTION_SHARE))
        self._empty = FreeRuns(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[BlockHash, int] = {}
        self._by_parent: dict[BlockHash, SharedBeginnings] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference: empty ones, and cached ones, which can be evicted."""
        return len(self._empty) + self.num_cached_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without a reference that a later request may still find."""
        return len(self._cached) + len(self._retained)

    def empty_runs(self, limit: int) -> list[tuple[int, int]]:
        """Return up to `limit` runs `[start, stop)` of empty blocks."""
        return self._empty.some_runs(limit)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int] | None:
        """Take `num_blocks` blocks, each with one reference; evicts cached ones if need be.

        Returns None and changes nothing if there are not enough free blocks.

        after: the last block of the table that grows; the block next to it is preferred.
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

    def num_freed(self, tables: Iterable[Sequence[int]], kept: Container[int]) -> int:
        """Return how many blocks would become free if all these tables were released, but for those `kept`."""
        counts = Counter(chain.from_iterable(tables))
        return sum(
            self.blocks[block_id].ref_count == num
            for block_id, num in counts.items()
            if block_id not in kept
        )

    def increment_ref(self, block_id: int) -> None:
        """Add a reference to a block that is in use or cached."""
        block = self.blocks[block_id]
        assert block.ref_count or block.block_hash, f"block {block_id} is empty"
        if block.ref_count == 0:
            del self._queue_of(block)[block_id]
            self._ages.reused(self.now - block.last_used)
        block.ref_count += 1

    def release(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Drop one reference to each block, the last block first.

        The tail of a prefix is useless without its head, so the tail must be evicted first.

        evict_first: evict these blocks before all blocks that are cached now.
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
        """Mark a cached block as most recently used."""
        self.increment_ref(block_id)
        self.release([block_id])

    def retain(self, block_hash: BlockHash, *, is_retained: bool = True) -> None:
        """Evict the block with this hash, if there is one, behind all that are not retained; or no longer."""
        if (block_id := self._by_hash.get(block_hash)) is None:
            return
        block = self.blocks[block_id]
        if block.ref_count == 0 and block.is_retained != is_retained:
            del self._queue_of(block)[block_id]
            block.is_retained = is_retained
            self._queue_of(block)[block_id] = None
        block.is_retained = is_retained

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block with this hash, in use or cached; None if there is none."""
        return self._by_hash.get(block_hash)

    def find_beginning(self, contents: BlockContents) -> tuple[int, int]:
        """Return the longest common beginning with any block of the same parent: its length and the block.

        The length is in tokens; `(0, -1)` if no block has this parent.
        """
        following = self._by_parent.get(contents.parent)
        return (0, -1) if following is None else following.longest(contents.tokens)

    def publish(
        self, block_id: int, block_hash: BlockHash, contents: BlockContents | None = None
    ) -> None:
        """Make a block in use findable by its hash and, with `contents`, by its first tokens.

        If another block with the same hash is findable already, that one stays, and this block remains
        private: it becomes empty when it is released.
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
        """Return a second table over the same blocks, with a reference of its own to each."""
        for block_id in table.block_ids:
            self.increment_ref(block_id)
        return BlockTable(table.block_ids)

    def make_writable(self, table: BlockTable, index: int) -> BlockCopy | None:
        """Copy-on-write: replace the block at `index` by one of the table's own if it is shared.

        Returns the copy that the model runner has to make; None if the block was not shared.

        Raises:
            NoFreeBlocks: the block is shared and there is none to copy it to.
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
        """Make all blocks unfindable, since their contents are lost after a failed step."""
        self._evict(self.num_cached_blocks)
        for block in self.blocks:
            block.block_hash = block.contents = None
            block.is_retained = False
        self._by_hash.clear()
        self._by_parent.clear()

    def take_ages(self) -> BlockAges:
        """Return the ages of blocks that were evicted or reused since the last call."""
        return self._ages.take()

    def _free(self, block: KVBlock) -> None:
        if block.block_hash is None:
            self._empty.put(block.block_id)
        else:
            block.last_used = self.now
            self._queue_of(block)[block.block_id] = None

    def _queue_of(self, block: KVBlock) -> OrderedDict[int, None]:
        """Return where a cached block waits for its eviction."""
        return self._retained if block.is_retained else self._cached

    def _evict(self, num_blocks: int) -> None:
        for _ in range(min(num_blocks, self.num_cached_blocks)):
            block_id, _ = (self._cached or self._retained).popitem(last=False)
            block = self.blocks[block_id]
            assert block.block_hash is not None
            del self._by_hash[block.block_hash]
            if self.on_evict is not None:
                self.on_evict(block.block_hash)
            block.block_hash = None
            block.is_retained = False
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
    """No block is empty or cached."""

"""The KV blocks of sliding-window layers, which a request gives up when they leave the window."""

from collections.abc import Sequence
from typing import Final

from batching.block_manager import BlockCopy, BlockHash, PagedBlockManager
from batching.config import SchedulerConfig, blocks_held, blocks_in_window
from batching.request import BatchRequest
from batching.steps.stats import SchedulerStats

# From so many on, other requests are taken to begin with a block, too.
_MIN_HITS: Final = 2


class WindowBlocks:
    """Gives admitted requests the blocks that their sliding-window layers can still attend to.

    A request holds the blocks of its next tokens and those within the window of the end of its last full
    block, so that another request can continue from there.  Blocks that it gave up stay findable until
    they are evicted, which happens earlier than for blocks that it holds until its end.

    There are enough blocks for one request (SchedulerConfig checks that).  More requests are admitted if
    there is room for the window of each and for a chunk of prompt.  A request with room for its next
    token, and for those that no step may cut from it, can always be computed; a chunk ends where its
    blocks end.

    Only this class writes a request's `window_table`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.window is not None, "the caller checks"
        self.block_manager = PagedBlockManager(config.num_window_blocks, config.block_size)
        self._block_size = config.block_size
        self._num_visible = blocks_in_window(config.window, config.block_size)
        self._num_held = blocks_held(config.window, config.block_size)
        self._num_in_chunk = config.num_blocks_in_chunk
        self._num_in_span = config.num_blocks_in_span
        self._copies: list[BlockCopy] = []
        self._num_missed_tokens = 0
        self._admitted: dict[int, BatchRequest] = {}
        # The blocks that a request would have begun with.
        self._wanted: dict[int, range] = {}

    def add_to(self, stats: SchedulerStats) -> SchedulerStats:
        """Return the statistics of the scheduler, those of these blocks included."""
        return stats._replace(
            num_window_blocks=self.block_manager.num_blocks,
            num_free_window_blocks=self.block_manager.num_free_blocks,
            num_window_missed_tokens=self._num_missed_tokens,
        )

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies to be made before the next step, each once."""
        copies, self._copies = self._copies, []
        return copies

    def num_usable(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of these leading blocks can be reused: the window before their end is there."""
        stop = index = len(hashes)
        while index > max(0, stop - self._num_visible):
            index -= 1
            if self.block_manager.find(hashes[index]) is None:
                stop = index
        return stop

    def num_available(self) -> int:
        """Return how many free blocks remain when the window of each admitted request is full."""
        missing = sum(map(self._num_missing, self._admitted.values()))
        return self.block_manager.num_free_blocks - missing

    def num_freed(self, requests: Sequence[BatchRequest], cached: Sequence[BlockHash]) -> int:
        """Return how many more blocks would be available if these requests were released.

        cached: the blocks behind which another request starts, which it shares.
        """
        num_missing = sum(map(self._num_missing, requests))
        _, kept = self._visible(cached)
        return num_missing + self.block_manager.num_freed(
            (r.window_table.held for r in requests), kept
        )

    def num_to_start(self, request: BatchRequest, cached: Sequence[BlockHash]) -> int:
        """Return how many available blocks it takes to start a request behind these cached blocks.

        They are the blocks of its window and those of one chunk, so that a prompt does not advance block by
        block.
        """
        first, block_ids = self._visible(cached)
        num_needed = min(
            self.block_manager.blocks_for(request.num_tokens) - first,
            self._num_held + self._num_in_chunk,
            self.block_manager.num_blocks,
        )
        num_idle = sum(not self.block_manager.blocks[b].ref_count for b in block_ids)
        return num_needed - len(block_ids) + num_idle

    def start(self, request: BatchRequest, cached: Sequence[BlockHash], num_found: int) -> None:
        """Share the cached blocks in the window of a request that starts behind the blocks `cached`.

        num_found: how many blocks it could have shared if their windows were there.
        """
        if num_found > len(cached):
            self._wanted[request.request_id] = range(self._first_visible(num_found), num_found)
        if request.num_preemptions == 0:
            self._num_missed_tokens += (num_found - len(cached)) * self._block_size
        first, block_ids = self._visible(cached)
        for block_id in block_ids:
            self.block_manager.blocks[block_id].num_hits += 1
        self._share(request, first, block_ids)

    def fork(self, request: BatchRequest, fork: BatchRequest, num_tokens: int) -> None:
        """Share what a fork of a request sees that begins behind `num_tokens` tokens."""
        first = self._first_visible(num_tokens // self._block_size)
        self._share(fork, first, request.window_table.block_ids[first:])

    def visible_before(self, stop: int) -> range:
        """Return the blocks that a request sees which goes on behind `stop` blocks."""
        return range(self._first_visible(stop), stop)

    def restart(self, request: BatchRequest, stop: int) -> list[int] | None:
        """Give a request blocks of its own for what it sees behind `stop` blocks, in place of those that it has.

        Returns None and changes nothing if there is no room.
        """
        first = self._first_visible(stop)
        if (block_ids := self.block_manager.allocate(stop - first)) is None:
            return None
        self.block_manager.release(request.window_table.held)
        request.window_table.hold(first, block_ids)
        return block_ids

    def has_room(self, request: BatchRequest) -> bool:
        """True if the least that a step can process of a request has blocks of its own, or can get them."""
        return self._num_to_grow(request) <= self.block_manager.num_free_blocks

    def has_room_for_all(self, requests: Sequence[BatchRequest]) -> bool:
        """True if each of these requests is certain to have that room after the step in flight, too."""
        num_needed = sum(
            1 + (self._num_in_span if r.spans.has_ahead(r.num_computed_tokens) else 0)
            for r in requests
        )
        return num_needed <= self.block_manager.num_free_blocks

    def _num_to_grow(self, request: BatchRequest) -> int:
        table, start = request.window_table, request.num_computed_tokens
        index = start // self._block_size
        is_shared = index < len(table) and (
            self.block_manager.blocks[table.block_ids[index]].ref_count > 1
        )
        stop = start + request.num_inseparable
        return max(0, self.block_manager.blocks_for(stop) - len(table)) + is_shared

    def max_stop(self, request: BatchRequest) -> int:
        """Return how far a request can be computed in this step, if it has room for its next token."""
        num_blocks = len(request.window_table) + self.block_manager.num_free_blocks
        return num_blocks * self._block_size

    def grow(self, request: BatchRequest, stop: int) -> None:
        """Make room up to `stop`, in blocks of the request's own; the caller has checked the room."""
        table, index = request.window_table, request.num_computed_tokens // self._block_size
        if index < len(table):
            copy = self.block_manager.make_writable(table, index)
            if copy is not None:
                self._copies.append(copy._replace(is_windowed=True))
        missing = self.block_manager.blocks_for(stop) - len(table)
        if missing > 0:
            block_ids = self.block_manager.allocate(missing, table.last_block)
            assert block_ids is not None, "room was checked"
            table.extend(block_ids)

    def commit(
        self, request: BatchRequest, hashes: Sequence[BlockHash], start: int, stop: int
    ) -> None:
        """Make blocks `[start, stop)` findable, and give up those that are visible no more."""
        table = request.window_table
        for index in range(start, stop):
            self.block_manager.publish(table.block_ids[index], hashes[index])
            if index in self._wanted.get(request.request_id, ()):
                self.block_manager.blocks[table.block_ids[index]].num_hits = _MIN_HITS
        first = self._first_visible(request.num_computed_tokens // self._block_size)
        if first > table.num_dropped:
            self._give_up(table.drop(first))

    def publish(self, request: BatchRequest, hashes: Sequence[BlockHash], stop: int) -> None:
        """Make the blocks findable that a request holds before index `stop`; they have been restored."""
        table = request.window_table
        for index in range(table.num_dropped, stop):
            self.block_manager.publish(table.block_ids[index], hashes[index])

    def release(self, request: BatchRequest) -> None:
        """Take back all blocks of a request."""
        self._wanted.pop(request.request_id, None)
        del self._admitted[request.request_id]
        self.block_manager.release(request.window_table.held)
        request.window_table.clear()

    def _give_up(self, block_ids: Sequence[int]) -> None:
        """Release blocks in the middle of a request, where hardly any other will begin.

        More than one has begun at the end of a prefix that they share.  One begins at the end of
        another's turn, and goes on from there.
        """
        blocks = self.block_manager.blocks
        shared = [b for b in block_ids if blocks[b].num_hits >= _MIN_HITS]
        self.block_manager.release(shared)
        others = [b for b in block_ids if blocks[b].num_hits < _MIN_HITS]
        self.block_manager.release(others, evict_first=True)

    def _first_visible(self, index: int) -> int:
        """Return the first block that a token in block `index` may see."""
        return max(0, index - self._num_visible)

    def _visible(self, cached: Sequence[BlockHash]) -> tuple[int, list[int]]:
        """Return the first block that a request sees which begins behind these, and all their ids."""
        first = self._first_visible(len(cached))
        found = [self.block_manager.find(block_hash) for block_hash in cached[first:]]
        return first, [block_id for block_id in found if block_id is not None]

    def _num_missing(self, request: BatchRequest) -> int:
        """Return how many blocks more a request will have when its window is full."""
        table = request.window_table
        num_left = self.block_manager.blocks_for(request.num_tokens) - table.num_dropped
        return max(0, min(num_left, self._num_held) - len(table.held))

    def _share(self, request: BatchRequest, first: int, block_ids: list[int]) -> None:
        self._admitted[request.request_id] = request
        for block_id in block_ids:
            self.block_manager.increment_ref(block_id)
        request.window_table.hold(first, block_ids)

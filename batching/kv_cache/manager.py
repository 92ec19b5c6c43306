"""Manages what admitted requests hold: KV blocks, recurrent states, slots of adapters."""

from collections.abc import Sequence
from typing import NamedTuple

from batching.adapters.adapter import NO_SLOT
from batching.adapters.slots import AdapterSlots
from batching.block_manager import (
    BlockContents,
    BlockCopy,
    BlockHash,
    NoFreeBlocks,
    PagedBlockManager,
)
from batching.config import SchedulerConfig
from batching.kv_cache.cache_events import CacheEventLog
from batching.kv_cache.partial_blocks import PartialBlocks, PartialHit
from batching.kv_cache.prefix_lookup import PrefixHit, PrefixLookup
from batching.kv_cache.retained_prefixes import RetainedPrefixes
from batching.kv_cache.state_slots import StateSlots
from batching.kv_cache.store_orders import StoreOrders
from batching.kv_cache.stored_blocks import StoredBlocks
from batching.kv_cache.window_blocks import WindowBlocks
from batching.prefix_cache import PrefixCache
from batching.priority_queue import RunningKey
from batching.request import BatchRequest
from batching.steps.stats import SchedulerStats
from batching.steps.step_plan import RestoreOrder, Slice


class NumBlocks(NamedTuple):
    """Numbers of blocks in the main pool (`general`) and in that of sliding-window layers (`windowed`)."""

    general: int
    windowed: int = 0

    def plus(self, other: "NumBlocks") -> "NumBlocks":
        return NumBlocks(self.general + other.general, self.windowed + other.windowed)

    def fits(self, other: "NumBlocks") -> bool:
        return self.general <= other.general and self.windowed <= other.windowed


class KVCacheManager:
    """Gives requests their blocks, from the free blocks and from the prefix cache.

    Only this class writes a request's `block_table` and `num_computed_tokens`.

    Copies of blocks are made before the next step, in the order in which they were planned; a block that
    is to be copied can therefore be evicted and overwritten immediately.

    states: recurrent states; None if the model has none.
    windows: the pool of sliding-window layers; None if they share the main pool.
    partials: finds blocks that share only their first tokens with a prompt; None if requests start at
        block boundaries only.
    store: what is to be stored, and restored; None without a store, or a prefix cache.
    retained: what requests ask to be evicted last; all can be, so that no request waits for it.
    adapters: the slots of adapters, of which each request with one holds one, too.
    events: what becomes of shared blocks, for others to route requests by; None records nothing.
    """

    def __init__(self, config: SchedulerConfig, stored: StoredBlocks | None = None) -> None:
        self.block_manager = PagedBlockManager(config.num_blocks, config.block_size)
        self.prefix_cache = PrefixCache(self.block_manager)
        self.events: CacheEventLog | None = None
        self._copies: list[BlockCopy] = []
        self.adapters = AdapterSlots(config.max_adapters)
        self.states: StateSlots | None = None
        if config.num_checkpoints is not None:
            self.states = StateSlots(
                self.block_manager, config.max_num_seqs, config.num_checkpoints
            )
        self.windows = None if config.window is None else WindowBlocks(config)
        checkpoints = None if self.states is None else self.states.checkpoints
        # A state is not in a block, and windowed layers may have lost theirs.
        can_begin_within = self.states is None and self.windows is None
        self.partials: PartialBlocks | None = None
        if can_begin_within and config.enable_prefix_cache and config.min_copied_tokens is not None:
            self.partials = PartialBlocks(self.block_manager, config.min_copied_tokens)
        self.prefixes = PrefixLookup(
            config, self.prefix_cache, checkpoints, self.windows, self.partials
        )
        self.retained = RetainedPrefixes(
            self.prefixes, self.block_manager, checkpoints, self.windows
        )
        self.store: StoreOrders | None = None
        if stored is not None and config.enable_prefix_cache:
            self.store = StoreOrders(stored, self.block_manager, self.states, self.windows)

    def add_to(self, stats: SchedulerStats) -> SchedulerStats:
        """Return the statistics with those of states, sliding-window layers and the store filled in."""
        stats = stats._replace(
            num_retained_blocks=len(self.retained.blocks),
            num_pinned_blocks=self.retained.blocks.num_pinned,
            max_pinned_blocks=self.retained.blocks.max_pinned,
            num_adapters_loaded=len(self.adapters.loaded),
            num_adapter_hits=self.adapters.num_hits,
            num_adapter_loads=self.adapters.num_loads,
        )
        if self.states is not None:
            stats = self.states.add_to(stats)
        if self.store is not None:
            stats = stats._replace(store=self.store.use())
        return stats if self.windows is None else self.windows.add_to(stats)

    def available(self) -> NumBlocks:
        """Return how many blocks are available to start waiting requests."""
        num_windowed = 0 if self.windows is None else self.windows.num_available()
        return NumBlocks(self.block_manager.num_free_blocks, num_windowed)

    def num_blocks_to_start(self, request: BatchRequest, hit: PrefixHit) -> NumBlocks:
        """Return how many available blocks it takes to start a request that shares the blocks of `hit`.

        Sharing a cached block without a reference takes it from the free blocks as well.
        """
        num_cached = len(hit.block_ids)
        num_idle = sum(not self.block_manager.blocks[b].ref_count for b in hit.block_ids)
        num_general = self.block_manager.blocks_for(request.num_tokens) - num_cached + num_idle
        if self.windows is None:
            return NumBlocks(num_general)
        cached = self.prefixes.hashes(request)[:num_cached]
        return NumBlocks(num_general, self.windows.num_to_start(request, cached))

    def num_freed(
        self, requests: Sequence[BatchRequest], request: BatchRequest, hit: PrefixHit
    ) -> NumBlocks:
        """Return how many more blocks would be available to start `request` if `requests` were stopped."""
        tables = (r.block_table.block_ids for r in requests)
        num_general = self.block_manager.num_freed(tables, hit.block_ids)
        if self.windows is None:
            return NumBlocks(num_general)
        cached = self.prefixes.hashes(request)[: len(hit.block_ids)]
        return NumBlocks(num_general, self.windows.num_freed(requests, cached))

    def start(self, request: BatchRequest, hit: PrefixHit, key: RunningKey) -> None:
        """Give an admitted request blocks for all its tokens, those of `hit` included, and a slot for its adapter.

        The caller has checked that there are enough.
        """
        request.adapter_slot = self.adapters.take(request.spec.adapter)
        hashes, cached = self.prefixes.hashes(request), hit.block_ids
        for block_id in cached:
            self.block_manager.increment_ref(block_id)
        request.block_table.extend(cached)
        if hit.partial is not None:
            # Not the first to be evicted.
            self.block_manager.touch(hit.partial.block_id)
        has_grown = self._grow(request)
        assert has_grown, "room was checked"
        request.num_computed_tokens = len(cached) * self.block_manager.block_size
        is_restoring = self.store is not None and self.store.begin(
            request, self.prefixes.shareable(request), len(cached)
        )
        if hit.partial is not None and not is_restoring and self._is_there(hit.partial):
            target = request.block_table.block_ids[len(cached)]
            self._copy(BlockCopy(hit.partial.block_id, target))
            request.num_computed_tokens += hit.partial.num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache.record(request.num_tokens, request.num_cached_tokens)
        self.prefix_cache.mark_in_flight(hashes[len(cached) :], key)
        if self.states is not None:
            self.states.start(request, hashes[: len(cached)], hit.num_found)
        if self.windows is not None:
            self.windows.start(request, hashes[: len(cached)], hit.num_found)
        elif self.store is not None:
            # What was not stored when it was computed, or is deleted: without it the rest could not be read.
            missing = (i for i in range(len(cached)) if not self.store.has_block(hashes[i]))
            self.store.save_blocks(request, hashes, [*missing])

    def fork(self, request: BatchRequest, fork: BatchRequest, num_tokens: int) -> None:
        """Let a fork share all blocks of a request, which has `num_tokens` computed tokens."""
        fork.adapter_slot = self.adapters.take(fork.spec.adapter)
        fork.block_table = self.block_manager.fork(request.block_table)
        fork.num_computed_tokens = num_tokens
        fork.num_cached_tokens = request.num_cached_tokens
        if self.windows is not None:
            self.windows.fork(request, fork, num_tokens)

    def grow(self, request: BatchRequest) -> bool:
        """Make room for all tokens of a request; return False and change nothing if there is none.

        In sliding-window layers, room for the least that a step can process suffices.  If the block that is written next is
        shared, it is copied first.
        """
        if self.windows is not None and not self.windows.has_room(request):
            return False
        if not self._grow(request):
            return False
        if self.windows is not None:
            self.windows.grow(request, request.num_computed_tokens + request.num_inseparable)
        return True

    def has_room_to_grow(self, requests: Sequence[BatchRequest]) -> bool:
        """Return whether each of these requests is certain to get room for what its next step needs."""
        if self.windows is not None and not self.windows.has_room_for_all(requests):
            return False
        return self.block_manager.num_free_blocks >= len(requests)

    def num_computable(self, request: BatchRequest, num_tokens: int) -> int:
        """Return how many of a request's next `num_tokens` tokens fit in this step."""
        if self.windows is None:
            return num_tokens
        return min(num_tokens, self.windows.max_stop(request) - request.num_computed_tokens)

    def make_slice(
        self,
        request: BatchRequest,
        stop: int,
        drafts: tuple[int, ...] = (),
        forks: tuple[BatchRequest, ...] = (),
        *,
        may_end: bool = False,
    ) -> Slice:
        """Return the slice of a request's pending tokens up to `stop`, drafts included.

        may_end: the request may end before the slice is committed.
        """
        keep: tuple[int, ...] = ()
        if self.states is not None:
            hashes = self.prefixes.hashes(request)
            keep = self.states.keep(request, hashes, stop, len(drafts), may_end=may_end)
        if self.windows is not None:
            self.windows.grow(request, stop)
        return request.make_slice(stop, drafts, tuple(f.request_id for f in forks), keep)

    def restore(
        self, request: BatchRequest, max_seconds: float
    ) -> tuple[Sequence[RestoreOrder], float]:
        """Return what the next step restores of a request, and about how many seconds that takes.

        The request is then as if that had been computed.
        """
        if self.store is None or (restored := self.store.restore(request, max_seconds)) is None:
            return (), 0.0
        block_size = self.block_manager.block_size
        first, stop = request.num_computed_tokens // block_size, restored.num_blocks
        if stop > first:
            hashes = self.prefixes.hashes(request)
            self._insert(request, hashes, first, stop)
            if self.windows is not None:
                self.windows.publish(request, hashes, stop)
            request.num_computed_tokens = stop * block_size
            if request.num_preemptions == 0:
                self.prefix_cache.record(0, request.num_computed_tokens - request.num_cached_tokens)
                request.num_cached_tokens = request.num_computed_tokens
        return restored.orders, self.store.seconds_for(restored.orders)

    def is_restoring(self, request: BatchRequest) -> bool:
        """Return whether a request waits for what is read from the store."""
        return self.store is not None and self.store.is_restoring(request)

    def pass_time(self, now: float, seconds_per_token: float) -> None:
        """Look what is due when a step is planned.

        now: in seconds on the engine's clock.
        seconds_per_token: what computing a prompt takes; 0 is not known.
        """
        self.block_manager.now = now
        self.retained.expire(now)
        if self.store is not None:
            self.store.seconds_per_token = seconds_per_token
            self.store.pass_time(now)

    def commit(self, request: BatchRequest, s: Slice, stop: int) -> None:
        """Record that a slice of a request is computed up to `stop`, and make its full blocks findable.

        If drafts were rejected (`stop` is before the slice's end), the recurrent state at the end is of no
        use; the state at the start is kept, and the tokens are processed again.
        """
        if self.states is not None and stop < s.stop:
            return
        hashes = self.prefixes.hashes(request)
        request.num_computed_tokens = stop
        first, last = (at // self.block_manager.block_size for at in (s.start, stop))
        last = min(last, len(hashes))
        self._insert(request, hashes, first, last)
        if self.store is not None:
            self.store.save_blocks(request, hashes, range(first, last))
        if self.states is not None:
            checkpoints = self.states.commit(request, s, hashes)
            if self.store is not None:
                self.store.save_states(request, hashes, checkpoints)
        if self.windows is not None:
            self.windows.commit(request, hashes, first, last)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return the block copies to make before the next step, in order; each is returned once."""
        copies, self._copies = self._copies, []
        if self.windows is not None:
            copies += self.windows.take_copies()
        return tuple(copies)

    def release(self, request: BatchRequest, key: RunningKey) -> None:
        """Take back all that a request holds; full blocks stay cached."""
        self.adapters.release(request.spec.adapter)
        request.adapter_slot = NO_SLOT
        hashes = self.prefixes.hashes(request)
        self.prefix_cache.clear_in_flight(hashes, key)
        if self.states is not None:
            checkpoints = self.states.release(request, hashes)
            if self.store is not None:
                self.store.save_states(request, hashes, checkpoints)
        if self.windows is not None:
            self.windows.release(request)
        retained = self.retained.retain(request, hashes, self.block_manager.now)
        if self.store is not None:
            self.store.release(request, retained)
        if not self._forget_copy(request) and self.partials is not None:
            self.partials.release(request)
        self.block_manager.release(request.block_table.block_ids)
        request.block_table.clear()
        request.num_computed_tokens = 0

    def forget_cached(self) -> None:
        """Make all blocks unfindable, since their contents are lost after a failed step, as are adapters."""
        self.adapters.forget()
        if self.events is not None:
            self.events.clear()
        self.block_manager.forget_cached()
        self.retained.forget()
        if self.windows is not None:
            self.windows.block_manager.forget_cached()
        if self.store is not None:
            self.store.forget()

    def _insert(
        self, request: BatchRequest, hashes: Sequence[BlockHash], first: int, stop: int
    ) -> None:
        """Make full blocks of a request findable."""
        contents: Sequence[BlockContents] = ()
        if self.partials is not None:
            contents = request.contents(range(first, stop), self.block_manager.block_size)
        self.prefix_cache.insert(hashes, request.block_table, first, stop, contents)
        if self.events is not None and first < stop:
            self.events.store(request, hashes, first, stop)

    def _is_there(self, hit: PartialHit) -> bool:
        """Return False if the block to copy was evicted to make room for the very request."""
        return self.block_manager.find(hit.block_hash) == hit.block_id

    def _copy(self, copy: BlockCopy) -> None:
        # A pool may read all sources before it writes.
        assert all(copy.source != earlier.target for earlier in self._copies)
        self._copies.append(copy)

    def _forget_copy(self, request: BatchRequest) -> bool:
        """Drop the copy to a request's block that is not made yet; return whether there was one."""
        block_ids = request.block_table.block_ids
        copies = [copy for copy in self._copies if copy.target not in block_ids]
        has_one = len(copies) < len(self._copies)
        self._copies = copies
        return has_one

    def _grow(self, request: BatchRequest) -> bool:
        table = request.block_table
        missing = self.block_manager.blocks_for(request.num_tokens) - len(table)
        if missing == 0:
            return self._make_writable(request)
        if (block_ids := self.block_manager.allocate(missing, table.last_block)) is None:
            return False
        table.extend(block_ids)
        return True

    def _make_writable(self, request: BatchRequest) -> bool:
        """Copy the block that is written next if it is shared; return False if there is no free block."""
        index = request.num_computed_tokens // self.block_manager.block_size
        try:
            copy = self.block_manager.make_writable(request.block_table, index)
        except NoFreeBlocks:
            return False
        if copy is not None:
            self._copy(copy)
        return True

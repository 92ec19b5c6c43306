"""What of requests is read from the store, and what of theirs is written to it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from batching.block_manager import BlockHash, PagedBlockManager
from batching.block_store.keys import Key, Kind
from batching.block_store.statistics import Skip
from batching.kv_cache.restored_prefixes import Restore, RestoredPrefixes
from batching.kv_cache.retained_prefixes import RetainedPrefix
from batching.kv_cache.saved_blocks import SavedBlocks
from batching.kv_cache.state_slots import Checkpoint, StateSlots
from batching.kv_cache.stored_blocks import StoredBlocks
from batching.kv_cache.window_blocks import WindowBlocks
from batching.request import BatchRequest
from batching.steps.stats import StoreUse
from batching.steps.step_plan import RestoreOrder, SaveOrder

# The share of the time that storing has beside other work, and the seconds that it saves up for a step.
_SHARE: Final = 0.02
_LEAST_SECONDS: Final = 0.002
_MOST_SECONDS: Final = 0.02
# Seconds between prefixes that are read although computing seems faster.
_TRY_INTERVAL: Final = 60.0
# Of a step that does nothing else; a request that arrives meanwhile waits for that.
_IDLE_SECONDS: Final = 0.02


class Restored(NamedTuple):
    """What a step restores of a request.

    num_blocks: how many leading blocks it may go on behind.
    """

    orders: Sequence[RestoreOrder]
    num_blocks: int


class StoreOrders:
    """Orders for the store: a hit on disk is the least of the blocks, the windows and the state that are there.

    A request with a prefix in the store is admitted as if it had to compute all of it, and then waits, without a
    slice, while its blocks are read; other requests that need them wait for it.  What turns out to be lost is computed.

    seconds_per_token: what computing a prompt takes; 0 is not known.
    """

    def __init__(
        self,
        stored: StoredBlocks,
        block_manager: PagedBlockManager,
        states: StateSlots | None,
        windows: WindowBlocks | None,
    ) -> None:
        self.seconds_per_token = 0.0
        self._num_restored_tokens = 0
        self._stored = stored
        self._blocks = block_manager
        self._block_size = block_manager.block_size
        self._states = states
        self._windows = windows
        self._saved = SavedBlocks(stored)
        # The time that storing may take beside other work, and when that was reckoned.
        self._seconds_left = self._now = 0.0
        # When reading is tried next, although it seems slower than computing.
        self._next_try = _TRY_INTERVAL
        self._restored = RestoredPrefixes(stored)

    @property
    def num_unsaved(self) -> int:
        return len(self._saved)

    def use(self) -> StoreUse:
        """Return what is in the store, and what it has done."""
        stored, stats = self._stored, self._stored.stats
        return StoreUse(
            num_entries=stored.num_entries,
            num_bytes=stored.num_bytes,
            num_unsaved=len(self._saved),
            host_bytes=stored.host_bytes,
            num_restored_tokens=self._num_restored_tokens,
            num_read=stats.num_read,
            bytes_read=stats.bytes_read,
            num_written=stats.num_written,
            bytes_written=stats.bytes_written,
            num_lost=stats.num_lost,
            num_damaged=stats.num_damaged,
            skipped={str(reason): num for reason, num in stats.skipped.copy().items()},
        )

    # Reading

    def begin(
        self,
        request: BatchRequest,
        hashes: Sequence[BlockHash],
        first: int,
    ) -> bool:
        """Begin to restore what a request may share from block `first` on; return whether there is something.

        hashes: of the blocks that the request may share.
        """
        restore = self._found(hashes, first)
        if restore is None:
            return False
        seconds = self._stored.seconds_to_read(restore.left)
        if 0 < len(restore.blocks) * self._block_size * self.seconds_per_token < seconds:
            if self._now < self._next_try:
                self._stored.stats.skipped[Skip.READING_IS_SLOWER] += 1
                return False
            # Else one slow moment of a disk would be the last word about it.
            self._next_try = self._now + _TRY_INTERVAL
        self._restored.begin(request, restore)
        return True

    def is_restoring(self, request: BatchRequest) -> bool:
        return self._restored.of(request) is not None

    def restore(self, request: BatchRequest, max_seconds: float) -> Restored | None:
        """Return what the next step restores of a request; None if it restores nothing now.

        max_seconds: that it may take; a block is always possible.
        """
        if (restore := self._restored.of(request)) is None:
            return None
        if self._restored.is_lost(restore):
            self._restored.end(request)
            return None
        table = request.block_table.block_ids
        index = restore.first + restore.num_done
        seconds = self._stored.stats.restoring.seconds
        keys = self._restored.take_blocks(restore, max_seconds / seconds if seconds else 0.0)
        orders = [RestoreOrder(key, (table[index + i],)) for i, key in enumerate(keys)]
        if restore.others:
            return self._with_others(request, restore, orders)
        if restore.num_done == len(restore.blocks):
            self._restored.end(request)
        if not orders:
            return None
        self._num_restored_tokens += len(keys) * self._block_size
        return Restored(orders, index + len(keys))

    def seconds_for(self, orders: Sequence[RestoreOrder]) -> float:
        """Return about how long these orders take."""
        num_bytes = sum(self._stored.size_of(order.key) for order in orders)
        return num_bytes * self._stored.stats.restoring.seconds

    def release(self, request: BatchRequest, prefixes: Sequence[RetainedPrefix]) -> None:
        """Forget what is restored of a request that leaves, and record how long its prefixes are used."""
        self._restored.end(request)
        for hashes, seconds, given_way in prefixes:
            # Also those that were found in the pool, and were never read.
            if hashes and request.spec.retention.may_store:
                self._stored.mark_used(hashes, seconds)
            if given_way:
                self._stored.end_retention(given_way)

    def _with_others(
        self, request: BatchRequest, restore: Restore, orders: list[RestoreOrder]
    ) -> Restored:
        """Restore the end of a prefix, once all blocks are there; before, the request is where it began."""
        is_there = restore.num_done == len(restore.blocks) and self._restored.has_others(restore)
        if not is_there:
            return Restored(orders, restore.first)
        ends = self._others(request, restore)
        if ends is not None:
            self._restored.take_others(restore)
        self._restored.end(request)
        if ends is None:
            return Restored(orders, restore.first)
        self._num_restored_tokens += len(restore.blocks) * self._block_size
        return Restored([*orders, *ends], restore.stop)

    def _others(self, request: BatchRequest, restore: Restore) -> list[RestoreOrder] | None:
        """Return the orders for what belongs to the end of a prefix; None if there is no room for it."""
        orders: list[RestoreOrder] = []
        windows = [key for key in restore.others if key.kind is Kind.WINDOW]
        if self._windows is not None:
            block_ids = self._windows.restart(request, restore.stop)
            if block_ids is None:
                return None
            orders += [
                RestoreOrder(key, (each,)) for key, each in zip(windows, block_ids, strict=True)
            ]
        if self._states is not None:
            key = restore.others[-1]
            position = restore.stop * self._block_size
            slots = self._states.restore(request, key.block_hash, position)
            orders.append(RestoreOrder(key, slots, position))
        return orders

    def _found(self, hashes: Sequence[BlockHash], first: int) -> Restore | None:
        stop = first
        while stop < len(hashes) and self._stored.has(Key(Kind.BLOCK, hashes[stop])):
            stop += 1
        while stop > first:
            visible = self._visible(stop)
            missing = [i for i in visible if not self._stored.has(Key(Kind.WINDOW, hashes[i]))]
            if not missing and self._has_state(hashes[stop - 1]):
                return self._restore_of(hashes, first, stop, visible)
            # All prefixes that end behind one that is missing see it, too.
            stop = missing[0] if missing else stop - 1
        return None

    def _restore_of(
        self, hashes: Sequence[BlockHash], first: int, stop: int, visible: range
    ) -> Restore:
        others = [Key(Kind.WINDOW, hashes[i]) for i in visible]
        if self._states is not None:
            others.append(Key(Kind.STATE, hashes[stop - 1]))
        return Restore(first, [Key(Kind.BLOCK, each) for each in hashes[first:stop]], others)

    def _visible(self, stop: int) -> range:
        """Return the window that a request sees which goes on behind `stop` blocks."""
        return range(0) if self._windows is None else self._windows.visible_before(stop)

    def _has_state(self, block_hash: BlockHash) -> bool:
        return self._states is None or self._stored.has(Key(Kind.STATE, block_hash))

    # Writing

    def has_block(self, block_hash: BlockHash) -> bool:
        return self._stored.has(Key(Kind.BLOCK, block_hash))

    def save_blocks(
        self,
        request: BatchRequest,
        hashes: Sequence[BlockHash],
        indices: Sequence[int],
    ) -> None:
        """Ask for full blocks of a request to be stored, if it may be."""
        if not request.spec.retention.may_store:
            return
        contents = request.contents(indices, self._block_size)
        tables = [(Kind.BLOCK, request.block_table)]
        if self._windows is not None:
            tables.append((Kind.WINDOW, request.window_table))
        for index, prefix in zip(indices, contents, strict=True):
            is_of_prompt = (index + 1) * self._block_size <= request.num_prompt_tokens
            for kind, table in tables:
                key, block_id = Key(kind, hashes[index]), table.block_ids[index]
                order = SaveOrder(key, block_id, prefix.parent, tuple(prefix.tokens))
                self._saved.add(order, is_of_prompt=is_of_prompt)

    def save_states(
        self,
        request: BatchRequest,
        hashes: Sequence[BlockHash],
        checkpoints: Sequence[Checkpoint],
    ) -> None:
        """Ask for new checkpoints of a request to be stored, if it may be."""
        if not request.spec.retention.may_store:
            return
        for slot, position in checkpoints:
            index = position // self._block_size - 1
            (prefix,) = request.contents([index], self._block_size)
            key = Key(Kind.STATE, hashes[index])
            order = SaveOrder(key, slot, prefix.parent, tuple(prefix.tokens), position)
            self._saved.add(order, is_of_prompt=position <= request.num_prompt_tokens)

    def pass_time(self, now: float) -> None:
        """Give storing its share of the time since the last call; `now` is in seconds."""
        passed, self._now = max(0.0, now - self._now), now
        self._seconds_left = min(_MOST_SECONDS, self._seconds_left + passed * _SHARE)

    @property
    def can_save(self) -> bool:
        """True if something is to be stored that the store takes now."""
        return len(self._saved) > 0 and not self._stored.is_full

    @property
    def is_due(self) -> bool:
        """True if something can be stored, and there is time for it beside other work."""
        return self.can_save and self._seconds_left >= _LEAST_SECONDS

    def take_saves(self, *, is_busy: bool) -> list[SaveOrder]:
        """Return what the next step stores, each once.

        is_busy: the step has other work, beside which storing has a share of the time.
        """
        if not (self.is_due if is_busy else self.can_save):
            return []
        stats = self._stored.stats
        seconds, most = stats.saving.seconds, _IDLE_SECONDS
        if is_busy:
            most, self._seconds_left = self._seconds_left, 0.0
            # The thread that writes takes its time from the steps on a machine with few cores.
            seconds += stats.writing.seconds
        return self._saved.take(max(1, int(most / seconds)) if seconds else 1, self._is_there)

    def forget(self) -> None:
        """Record that the contents of all blocks and states are lost."""
        self._saved.forget()
        self._stored.drop_claimed()

    def _is_there(self, order: SaveOrder) -> bool:
        key = order.key
        if key.kind is Kind.BLOCK:
            return self._blocks.find(key.block_hash) == order.source
        if key.kind is Kind.WINDOW:
            assert self._windows is not None
            return self._windows.block_manager.find(key.block_hash) == order.source
        assert self._states is not None
        return self._states.checkpoints.find(key.block_hash) == order.source

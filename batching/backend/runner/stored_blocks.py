"""Carries blocks and states between the pool and the store."""

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

import mlx.core as mx

from batching.backend.paged.block_bytes import WrongBlock
from batching.backend.paged.kv_cache import PagedKVCache
from batching.block_store.entry_file import Buffer, Entry
from batching.block_store.keys import Kind
from batching.block_store.store import BlockStore
from batching.steps.step_plan import RestoreOrder, SaveOrder

logger = logging.getLogger(__name__)


class StoredBlocks:
    """Follows the orders of plans; the store learns how long that takes."""

    def __init__(
        self,
        cache: PagedKVCache,
        store: BlockStore,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._cache: Final = cache
        self._store: Final = store
        self._clock = clock

    def save(self, orders: Sequence[SaveOrder]) -> None:
        """Hand blocks and states over to be stored; no step is in flight."""
        if not orders:
            return
        began = self._clock()
        mx.synchronize()
        for order in orders:
            try:
                contents = self._exported(order)
            except Exception:
                # No request needs it.
                logger.exception("%s is not stored", order)
                continue
            self._store.put(Entry(order.key, order.parent, order.token_ids, contents))
        self._store.stats.saving.add(len(orders), self._clock() - began)

    def restore(self, orders: Sequence[RestoreOrder]) -> None:
        """Write what was read into the pool; no step that runs uses it.

        Raises:
            WrongBlock: it is not of this pool.
        """
        if not orders:
            return
        began, num_bytes = self._clock(), 0
        mx.synchronize()
        for order in orders:
            entry = self._store.take(order.key)
            try:
                self._import(order, entry.contents)
            except WrongBlock:
                # Else all later requests with this prefix would fail, too.
                self._store.distrust(order.key)
                raise
            num_bytes += entry.num_bytes
        mx.eval(self._cache.arrays)
        self._store.stats.restoring.add(num_bytes, self._clock() - began)

    def _exported(self, order: SaveOrder) -> Sequence[Buffer]:
        if order.key.kind is Kind.STATE:
            return self._cache.export_state(order.source, order.position)
        is_windowed = order.key.kind is Kind.WINDOW
        return self._cache.export_block(order.source, is_windowed=is_windowed)

    def _import(self, order: RestoreOrder, contents: Sequence[Buffer]) -> None:
        if order.key.kind is Kind.STATE:
            states = [bytes(each) for each in contents]
            self._cache.import_state(order.targets, order.position, states)
            return
        (target,) = order.targets
        is_windowed = order.key.kind is Kind.WINDOW
        self._cache.import_block(target, contents, is_windowed=is_windowed)

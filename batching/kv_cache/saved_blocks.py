"""Which blocks and states are to be stored: those that were made, prompts first."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from batching.block_store.keys import Key
from batching.block_store.statistics import Skip
from batching.kv_cache.stored_blocks import StoredBlocks
from batching.steps.step_plan import SaveOrder

# More than the largest pools have would be evicted before they were stored.
_MAX_WAITING: Final = 1 << 16


class SavedBlocks:
    """Collects what may be stored until a step has time for it."""

    def __init__(self, stored: StoredBlocks) -> None:
        self._stored = stored
        self._of_prompts: OrderedDict[Key, SaveOrder] = OrderedDict()
        self._others: OrderedDict[Key, SaveOrder] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of_prompts) + len(self._others)

    def add(self, order: SaveOrder, *, is_of_prompt: bool) -> None:
        """Ask for a block, or a state, to be stored, unless it is."""
        if self._stored.has(order.key):
            return
        queue = self._others
        if is_of_prompt or order.key in self._of_prompts:
            queue = self._of_prompts
            self._others.pop(order.key, None)
        # It may have been evicted, and be elsewhere now.
        queue[order.key] = order
        if len(queue) > _MAX_WAITING:
            queue.popitem(last=False)
            self._stored.stats.skipped[Skip.EVICTED] += 1

    def take(self, max_num: int, is_there: Callable[[SaveOrder], bool]) -> list[SaveOrder]:
        """Return what the next step stores.

        is_there: whether a block or a slot still has what it had.
        """
        orders: list[SaveOrder] = []
        for queue in (self._of_prompts, self._others):
            while queue and len(orders) < max_num:
                _, order = queue.popitem(last=False)
                if is_there(order):
                    orders.append(order)
                else:
                    self._stored.stats.skipped[Skip.EVICTED] += 1
        return orders

    def forget(self) -> None:
        """Record that all contents are lost."""
        self._of_prompts.clear()
        self._others.clear()

"""Which adapters are in the device's memory: slots, of which the least recently used is given to another one."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from batching.adapters.adapter import NO_SLOT, Adapter


class AdapterLoad(NamedTuple):
    """An order to put an adapter into a slot, from 1 on, before the step; what was there is not needed any more."""

    slot: int
    adapter: Adapter

    def __str__(self) -> str:
        return f"{self.adapter}>{self.slot}"


class AdapterSlots:
    """The adapters of admitted requests, and others that were used lately.

    A slot is never given to another adapter while a request that is admitted uses it.

    num_hits, num_loads: how often a request found its adapter in a slot, and how often not.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_hits = 0
        self.num_loads = 0
        self._num_slots = num_slots
        # The least recently used one first.
        self._slots: OrderedDict[Adapter, int] = OrderedDict()
        self._users: Counter[Adapter] = Counter()
        self._loads: list[AdapterLoad] = []

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The adapters in slots, the least recently used one first."""
        return tuple(self._slots)

    def has_room(
        self,
        adapter: Adapter | None,
        reserved: Iterable[Adapter | None] = (),
        leaving: Iterable[Adapter | None] = (),
    ) -> bool:
        """Return whether a request with this adapter could be admitted.

        reserved: the adapters of requests that will be admitted before.
        leaving: those of admitted requests that would have left by then, one entry for each.
        """
        if adapter is None:
            return True
        used = +(self._users - Counter(each for each in leaving if each is not None))
        others = {*used, *(each for each in reserved if each is not None)} - {adapter}
        return len(others) < self._num_slots

    def take(self, adapter: Adapter | None) -> int:
        """Return the slot for an admitted request; `has_room` was true.  An adapter that is in none will be loaded."""
        if adapter is None:
            return NO_SLOT
        self._users[adapter] += 1
        if (slot := self._slots.get(adapter)) is not None:
            self._slots.move_to_end(adapter)
            self.num_hits += 1
            return slot
        slot = self._free_slot()
        self._slots[adapter] = slot
        self._loads = [load for load in self._loads if load.slot != slot]
        self._loads.append(AdapterLoad(slot, adapter))
        self.num_loads += 1
        return slot

    def release(self, adapter: Adapter | None) -> None:
        """Take back what a request has that leaves the batch; the adapter stays in its slot for the next one."""
        if adapter is not None:
            self._users[adapter] -= 1
            self._users = +self._users

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Return what is to be loaded before the next step; each is returned once."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def forget(self) -> None:
        """Load all again, after a step that failed; no request is admitted."""
        assert not self._users, "a request has its adapter until it leaves"
        self._slots.clear()
        self._loads.clear()

    def _free_slot(self) -> int:
        if len(self._slots) < self._num_slots:
            return next(i for i in range(1, self._num_slots + 1) if i not in self._slots.values())
        unused = next(each for each in self._slots if each not in self._users)
        return self._slots.pop(unused)

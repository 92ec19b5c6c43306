"""Chooses the model that is loaded next, and the models that make room for it."""

from collections.abc import Mapping

from batching.models.residency.actions import Begin
from batching.models.residency.ledger import Ledger
from batching.models.residency.model_state import ModelState
from batching.models.residency.tracked_model import TrackedModel


class Room:
    """The memory for the next load; see `Residency`, whose models and ledger these are.

    min_resident: seconds for which a model stays after it was loaded.
    """

    def __init__(
        self, models: Mapping[str, TrackedModel], ledger: Ledger, min_resident: float
    ) -> None:
        self._models = models
        self._ledger = ledger
        self._min_resident = min_resident

    def next_load(self, now: float) -> Begin | None:
        """Begin the load of the model that is due first, if there is room; make room otherwise.

        While it waits for room, another one may begin that leaves it what it will need.
        """
        waiting = sorted(self._waiting(), key=lambda m: m.order)
        if not waiting or self._in(ModelState.LOADING):
            self._keep_what_drains(now, is_needed=bool(waiting))
            return None
        first, *others = waiting
        num_bytes = self._room_for(first, now)
        if num_bytes is not None:
            return self._begin(first, num_bytes, now)
        spare = self._ledger.free - max(0, first.need.least - self._coming())
        for model in others:
            if model.own_need is not None and model.need.least <= spare:
                return self._begin(model, min(model.need.wanted, spare), now)
        return None

    def _begin(self, model: TrackedModel, num_bytes: int, now: float) -> Begin:
        model.move_to(ModelState.LOADING, now)
        self._ledger.reserve(model.model_id, num_bytes)
        return Begin(model.model_id, num_bytes)

    def _keep_what_drains(self, now: float, *, is_needed: bool) -> None:
        for model in self._in(ModelState.DRAINING):
            if model.num_leases and not (is_needed or model.is_unwanted):
                model.move_to(ModelState.LOADED, now)

    def _coming(self) -> int:
        """Return the bytes of the models that drain."""
        return sum(self._ledger.of(m.model_id) for m in self._in(ModelState.DRAINING))

    def _waiting(self) -> list[TrackedModel]:
        """Return the models that are asked for and could be loaded."""
        return [m for m in self._in(ModelState.UNLOADED, ModelState.FAILED) if m.waiters]

    def _in(self, *states: ModelState) -> list[TrackedModel]:
        return [m for m in self._models.values() if m.state in states]

    def _room_for(self, wanted: TrackedModel, now: float) -> int | None:
        """Return the bytes that a load may take, or let other models drain until there is room.

        Idle models go for all that is wanted, models in use for the least of it only.
        """
        need, free = wanted.need, self._ledger.free
        for model in self._evictable(now):
            enough = need.wanted if model.is_idle else need.least
            is_spared = not model.is_idle and wanted.order[0]
            if free + self._coming() >= enough or is_spared:
                break
            model.move_to(ModelState.DRAINING, now)
        if free >= need.wanted:
            return need.wanted
        # Those without leases leave in a moment.
        is_all = all(m.num_leases for m in self._in(ModelState.DRAINING))
        return free if free >= need.least and is_all else None

    def _evictable(self, now: float) -> list[TrackedModel]:
        """Return the models that may make room: idle ones first, and of these the least recently used."""
        stayed = [
            m
            for m in self._in(ModelState.LOADED)
            if not m.is_pinned and now - m.changed >= self._min_resident
        ]
        return sorted(stayed, key=lambda m: (not m.is_idle, m.used))

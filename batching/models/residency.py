"""Decides which models are loaded: who may use one, who waits for one, and what makes room for it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple

from batching.errors import EngineClosed, ModelTooLarge
from batching.models.ledger import Ledger
from batching.models.model_state import TRANSITIONS, MemoryNeed, ModelState

# Seconds after a failed load in which the model's requests get its error without another try.
RETRY_INTERVAL: Final = 5.0
_UNKNOWN: Final = MemoryNeed()


class Begin(NamedTuple):
    """Load a model, in at most so many bytes."""

    model_id: str
    num_bytes: int


class Cancel(NamedTuple):
    """End a load that no request waits for any more."""

    model_id: str


class Close(NamedTuple):
    """Unload a model that serves no requests."""

    model_id: str


@dataclass(eq=False, slots=True)
class Waiter:
    """A request for a model, until it is granted, refused or has left.

    due_time: the waiter with the earliest one is first; see `PriorityQueueWithAging`.
    token: what the caller knows it by.
    is_best_effort: it waits behind all others, and no model in use makes room for it.
    """

    model_id: str
    due_time: float
    token: Any = None
    is_best_effort: bool = False


class Grant(NamedTuple):
    """Let a waiter use its model, which is loaded; `release` ends the use."""

    waiter: Waiter


class Refuse(NamedTuple):
    waiter: Waiter
    error: BaseException


Action = Begin | Cancel | Close | Grant | Refuse


@dataclass(slots=True)
class _Model:
    model_id: str
    # None until it is known.
    own_need: MemoryNeed | None
    is_pinned: bool
    idle_unload: float
    state: ModelState = ModelState.UNLOADED
    error: BaseException | None = None
    waiters: list[Waiter] = field(default_factory=list)
    num_leases: int = 0
    # Of the load, or the close, that is under way.
    is_cancelled: bool = False
    is_closing: bool = False
    # It is to drain.
    is_unwanted: bool = False
    # Seconds: since when it is loaded or has failed, and when it was last used.
    changed: float = -inf
    used: float = -inf
    num_changes: int = 0

    @property
    def need(self) -> MemoryNeed:
        return self.own_need or _UNKNOWN

    def move_to(self, state: ModelState, now: float) -> None:
        assert state in TRANSITIONS[self.state], f"{self.model_id}: {self.state} -> {state}"
        self.state, self.changed = state, now
        self.num_changes += 1

    @property
    def order(self) -> tuple[bool, float]:
        """The order of loads: the first waiter's due time, best-effort ones last."""
        return min((waiter.is_best_effort, waiter.due_time) for waiter in self.waiters)

    @property
    def is_idle(self) -> bool:
        return not self.num_leases and not self.waiters


class Residency:
    """Which models are loaded; a state machine for each of them, and one ledger for all.

    It is pure: no threads, no clock, no engines.  The caller reports what has happened, and does what
    `actions` returns after that.

    - A lease keeps a model loaded: it is unloaded only when it has none.
    - Models are loaded one after the other, first the one whose waiter is due first, so that no model
      waits for models that were asked for much later.
    - Room is made by the least recently used idle models; if they are not enough, by models that are in
      use, which drain: their requests end, and new ones wait for the next turn.
    - A model stays for `min_resident` seconds after it was loaded, so that two models which do not fit
      together take turns, at most 60 / `min_resident` times a minute.  The requests that waited for the load
      have a lease by then.
    - Pinned models never make room, and models in use none for best-effort requests alone.
    - A model that drains and whose room is not needed any more is as it was.

    Times are in seconds on one clock.
    """

    def __init__(self, capacity: int, min_resident: float) -> None:
        """capacity: bytes of all models together."""
        self.ledger = Ledger(capacity)
        self._min_resident = min_resident
        self._models: dict[str, _Model] = {}
        self._is_ended = False

    def add(
        self,
        model_id: str,
        need: MemoryNeed | None = None,
        *,
        is_pinned: bool = False,
        idle_unload: float | None = None,
    ) -> None:
        """Know a model, which is not loaded; what it needs can be told later, before it is asked for."""
        idle = inf if idle_unload is None else idle_unload
        self._models[model_id] = _Model(model_id, need, is_pinned, idle)

    def measured(self, model_id: str, need: MemoryNeed) -> None:
        """Record what a model needs."""
        self._models[model_id].own_need = need

    @property
    def num_changes(self) -> int:
        """How often a model has changed its state."""
        return sum(model.num_changes for model in self._models.values())

    def state(self, model_id: str) -> ModelState:
        return self._models[model_id].state

    def error(self, model_id: str) -> BaseException | None:
        """Return why the last load of a model failed; None if it did not."""
        return self._models[model_id].error

    def num_leases(self, model_id: str) -> int:
        return self._models[model_id].num_leases

    def num_waiting(self, model_id: str) -> int:
        return len(self._models[model_id].waiters)

    def expires(self, model_id: str) -> float | None:
        """Return when a model is unloaded if no request asks for it; None if it is in use, or never."""
        model = self._models[model_id]
        at = model.used + model.idle_unload
        can_expire = model.state is ModelState.LOADED and model.is_idle and not model.is_pinned
        return at if can_expire and at < inf else None

    def need(self, model_id: str) -> MemoryNeed | None:
        """Return what a model needs; None if that is not known yet."""
        return self._models[model_id].own_need

    # What happens

    def ask(self, waiter: Waiter) -> None:
        """Ask for a model; a Grant or a Refuse follows unless the waiter leaves."""
        self._models[waiter.model_id].waiters.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Wait no more; does nothing if the waiter was granted or refused."""
        waiters = self._models[waiter.model_id].waiters
        if waiter in waiters:
            waiters.remove(waiter)

    def release(self, model_id: str, now: float) -> None:
        """End a use that was granted."""
        model = self._models[model_id]
        model.num_leases -= 1
        model.used = now

    def loaded(self, model_id: str, num_bytes: int, now: float) -> None:
        """Record the end of a load, and the bytes that the model takes."""
        model = self._models[model_id]
        model.move_to(ModelState.LOADED, now)
        model.used, model.error, model.is_cancelled = now, None, False
        if model.own_need is None:
            model.own_need = MemoryNeed(num_bytes, num_bytes)
        self.ledger.settle(model_id, num_bytes)

    def failed(self, model_id: str, error: BaseException | None, now: float) -> None:
        """Record the end of a load without a model; None if it was cancelled."""
        model = self._models[model_id]
        model.move_to(ModelState.UNLOADED if error is None else ModelState.FAILED, now)
        model.error, model.is_cancelled, model.is_unwanted = error, False, False
        self.ledger.release(model_id)

    def closed(self, model_id: str, now: float) -> None:
        """Record that a model is unloaded."""
        model = self._models[model_id]
        model.move_to(ModelState.UNLOADED, now)
        model.is_closing = model.is_unwanted = False
        self.ledger.release(model_id)

    def unload(self, model_id: str) -> None:
        """Let a model go, pinned or not, once those that have it or wait for it now are served."""
        model = self._models[model_id]
        model.is_unwanted = model.state in (ModelState.LOADED, ModelState.LOADING)

    def end(self) -> None:
        """Refuse the requests that wait, and those that ask from now on."""
        self._is_ended = True

    # What follows

    def actions(self, now: float) -> list[Action]:
        """Return what is to be done now; each action is returned once."""
        answers = [*self._answers(now)]
        self._drain(now)
        return [*answers, *self._cancels(), *self._next_load(now), *self._closes()]

    def _answers(self, now: float) -> Iterator[Action]:
        """Grant what is loaded, refuse what cannot be."""
        for model in self._models.values():
            for waiter in [*model.waiters]:
                if (error := self._refusal(model, now)) is not None:
                    model.waiters.remove(waiter)
                    yield Refuse(waiter, error)
                elif model.state is ModelState.LOADED:
                    model.waiters.remove(waiter)
                    model.num_leases += 1
                    yield Grant(waiter)

    def _refusal(self, model: _Model, now: float) -> BaseException | None:
        if self._is_ended:
            return EngineClosed()
        if model.state is ModelState.FAILED and now - model.changed < RETRY_INTERVAL:
            return model.error
        if model.state not in (ModelState.UNLOADED, ModelState.FAILED):
            return None
        pinned = sum(self._pinned_bytes(m) for m in self._models.values() if m is not model)
        most = self.ledger.capacity - pinned
        if model.need.least > most:
            return ModelTooLarge(model.model_id, model.need.least, most, pinned)
        return None

    def _pinned_bytes(self, model: _Model) -> int:
        return max(self.ledger.of(model.model_id), model.need.least) if model.is_pinned else 0

    def _cancels(self) -> Iterator[Action]:
        for model in self._models.values():
            is_wanted = bool(model.waiters) and not self._is_ended
            if model.state is ModelState.LOADING and not is_wanted and not model.is_cancelled:
                model.is_cancelled = True
                yield Cancel(model.model_id)

    def _drain(self, now: float) -> None:
        """Let go what is not wanted, or has been idle for too long."""
        for model in self._models.values():
            expires = self.expires(model.model_id)
            is_over = model.is_unwanted or (expires is not None and expires <= now)
            if model.state is ModelState.LOADED and is_over:
                model.move_to(ModelState.DRAINING, now)

    def _closes(self) -> Iterator[Action]:
        for model in self._models.values():
            has_drained = model.state is ModelState.DRAINING and not model.num_leases
            if has_drained and not model.is_closing:
                model.is_closing = True
                yield Close(model.model_id)

    def _next_load(self, now: float) -> Iterator[Action]:
        """Begin the load of the model that is due first, if there is room; make room otherwise.

        While it waits for room, another one may begin that leaves it what it will need.
        """
        waiting = sorted(self._waiting(), key=lambda m: m.order)
        if not waiting or self._in(ModelState.LOADING) or self._is_ended:
            self._keep_what_drains(now, is_needed=bool(waiting))
            return
        first, *others = waiting
        num_bytes = self._room_for(first, now)
        if num_bytes is not None:
            yield self._begin(first, num_bytes, now)
            return
        spare = self.ledger.free - max(0, first.need.least - self._coming())
        for model in others:
            if model.own_need is not None and model.need.least <= spare:
                yield self._begin(model, min(model.need.wanted, spare), now)
                return

    def _begin(self, model: _Model, num_bytes: int, now: float) -> Begin:
        model.move_to(ModelState.LOADING, now)
        self.ledger.reserve(model.model_id, num_bytes)
        return Begin(model.model_id, num_bytes)

    def _keep_what_drains(self, now: float, *, is_needed: bool) -> None:
        for model in self._in(ModelState.DRAINING):
            if model.num_leases and not (is_needed or model.is_unwanted):
                model.move_to(ModelState.LOADED, now)

    def _coming(self) -> int:
        """Return the bytes of the models that drain."""
        return sum(self.ledger.of(m.model_id) for m in self._in(ModelState.DRAINING))

    def _waiting(self) -> list[_Model]:
        """Return the models that are asked for and could be loaded."""
        return [m for m in self._in(ModelState.UNLOADED, ModelState.FAILED) if m.waiters]

    def _in(self, *states: ModelState) -> list[_Model]:
        return [m for m in self._models.values() if m.state in states]

    def _room_for(self, wanted: _Model, now: float) -> int | None:
        """Return the bytes that a load may take, or let other models drain until there is room.

        Idle models go for all that is wanted, models in use for the least of it only.
        """
        need, free = wanted.need, self.ledger.free
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

    def _evictable(self, now: float) -> list[_Model]:
        """Return the models that may make room: idle ones first, and of these the least recently used."""
        stayed = [
            m
            for m in self._in(ModelState.LOADED)
            if not m.is_pinned and now - m.changed >= self._min_resident
        ]
        return sorted(stayed, key=lambda m: (not m.is_idle, m.used))

"""Decides which models are loaded: who may use one, who waits for one, and what makes room for it."""

from collections.abc import Iterator
from math import inf
from typing import Final

from batching.errors import EngineClosed, ModelTooLarge
from batching.models.residency.actions import Action, Cancel, Close, Grant, Refuse, Waiter
from batching.models.residency.ledger import Ledger
from batching.models.residency.model_state import MemoryNeed, ModelState
from batching.models.residency.room import Room
from batching.models.residency.tracked_model import TrackedModel

# Seconds after a failed load in which the model's requests get its error without another try.
RETRY_INTERVAL: Final = 5.0


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
        self._models: dict[str, TrackedModel] = {}
        self._room = Room(self._models, self.ledger, min_resident)
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
        self._models[model_id] = TrackedModel(model_id, need, is_pinned, idle)

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
        seconds = model.idle_unload if model.keep_alive is None else model.keep_alive
        at = model.used + seconds
        can_expire = model.state is ModelState.LOADED and model.is_idle and not model.is_pinned
        return at if can_expire and at < inf else None

    def need(self, model_id: str) -> MemoryNeed | None:
        """Return what a model needs; None if that is not known yet."""
        return self._models[model_id].own_need

    # What happens

    def ask(self, waiter: Waiter, keep_alive: float | None = None) -> None:
        """Ask for a model; a Grant or a Refuse follows unless the waiter leaves.

        keep_alive: seconds without a further request after which the model is unloaded, unless it is pinned;
            None are those that it was added with.  That of the last request decides.
        """
        model = self._models[waiter.model_id]
        model.waiters.append(waiter)
        model.keep_alive = keep_alive

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
        cancels = [*self._cancels()]
        load = self._room.next_load(now)
        return [*answers, *cancels, *([] if load is None else [load]), *self._closes()]

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

    def _refusal(self, model: TrackedModel, now: float) -> BaseException | None:
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

    def _pinned_bytes(self, model: TrackedModel) -> int:
        return max(self.ledger.of(model.model_id), model.need.least) if model.is_pinned else 0

    def _cancels(self) -> Iterator[Action]:
        for model in self._models.values():
            is_loading = model.state is ModelState.LOADING and not model.is_cancelled
            if is_loading and not model.waiters:
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

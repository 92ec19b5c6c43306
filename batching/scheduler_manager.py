"""The engines of a server by model id: loaded on demand by one MLX thread, unloaded to make room."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from itertools import islice
from time import monotonic
from typing import Final

from batching.adapters.files.registry import AdapterRegistry, ServedAdapter
from batching.backend_calls.build import Build, backend_build
from batching.config import EngineConfig
from batching.engine.async_engine import AsyncEngine
from batching.engine.mlx_thread import MLXThread
from batching.errors import EngineStopped, ModelNotFound, RankLost, RequestError
from batching.models.engines import Engines, load_failure
from batching.models.health import Health
from batching.models.lease import Lease, LeaseRequest
from batching.models.listeners import Listeners
from batching.models.model_status import ModelStatus
from batching.models.residency.actions import Action, Begin, Cancel, Close, Grant, Refuse, Waiter
from batching.models.residency.model_state import MemoryNeed, ModelState
from batching.models.residency.residency import Residency
from batching.models.served_model import ServedModel

DEFAULT_MIN_RESIDENT: Final = 5.0
_NO_LIMIT: Final = 1 << 62
# The most names that an unknown one is compared with, each in up to a millisecond.
_MAX_COMPARED: Final = 64


class SchedulerManager:
    """One engine, and hence one scheduler and one KV pool, for each model that is loaded.

    `Residency` decides which models are loaded; the manager does what it decides, and tells it what has
    happened.  All methods may be called from any thread and none waits, except `get` and `close`.

    is_closed: no more models are loaded.
    listeners: they are told of every change of a model's state, and of the end.
    adapters: those that requests can name.
    engines: of the models that are loaded, and the loads of others.
    health: of what all models share.
    """

    def __init__(
        self,
        models: Iterable[ServedModel | EngineConfig],
        build: Build | None = None,
        *,
        capacity: int | None = None,
        min_resident: float = DEFAULT_MIN_RESIDENT,
        need: Callable[[EngineConfig], MemoryNeed | None] = lambda _: MemoryNeed(),
        lost: Callable[[], RankLost | None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Serve these models; the first one is the default.

        build: makes the engine of a configuration, in the MLX thread; None is the MLX backend.
        capacity: bytes of all models together; None is no limit.
        min_resident: see `Residency`.
        need: returns what a model is expected to take, None if that is not known yet, so that it is asked again.
        lost: returns why the ranks that the model is divided among can compute no more; None if it is not divided.

        Raises:
            ModelTooLarge: the pinned models do not fit.
        """
        served = [m if isinstance(m, ServedModel) else ServedModel(config=m) for m in models]
        self._models = {model.model_id: model for model in served}
        self._names = {alias: m.model_id for m in served for alias in (*m.aliases, m.model_id)}
        self.adapters = AdapterRegistry(self._names.__contains__)
        self._clock = clock
        self._thread = MLXThread(clock)
        self.engines = Engines(build or backend_build(), self._thread, self.adapters)
        step_timeout = max(model.config.step_timeout for model in served)
        self.health = Health(self._thread, step_timeout, lost)
        # Guards all that follows, which any thread may change, and the loads and ends of engines.
        self._lock = threading.RLock()
        self._residency = Residency(_NO_LIMIT if capacity is None else capacity, min_resident)
        for model in served:
            self._residency.add(
                model.model_id, is_pinned=model.is_pinned, idle_unload=model.idle_unload
            )
        self.is_closed = False
        self._need = need
        self.listeners = Listeners()
        # The changes of states that the listeners know.
        self._num_changes = 0
        pinned = [model.model_id for model in served if model.is_pinned]
        for model_id in pinned:
            self.measure(model_id)
        self._residency.ledger.check({name: self._residency.need(name) for name in pinned})

    @property
    def model_ids(self) -> tuple[str, ...]:
        """The ids of the served models; the first one is the default."""
        return tuple(self._models)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The served models; the first one is the default."""
        return tuple(self._models.values())

    def resolve(self, name: str) -> str:
        """Return the id of the model with this id or alias, or with an adapter that this names.

        Raises:
            ModelNotFound: no such model is served here.
        """
        if (model_id := self._names.get(name)) is not None:
            return model_id
        if (adapter := self.adapter(name)) is not None:
            return adapter.base
        names = islice((*self._names, *self.adapters.names), _MAX_COMPARED)
        raise ModelNotFound(name, get_close_matches(name, names, n=2))

    def adapter(self, name: str) -> ServedAdapter | None:
        """Return the adapter that a request names, as `name` or `base:name`; None if it names a model, or nothing."""
        if name in self._names:
            return None
        base, colon, own_name = name.rpartition(":")
        return self.adapters.find(f"{self._names.get(base, base)}{colon}{own_name}")

    def is_measured(self, name: str) -> bool:
        """Return whether it is known what a model needs, so that `request` reads no files.

        Raises:
            ModelNotFound: no such model is served here.
        """
        return self._residency.need(self.resolve(name)) is not None

    def measure(self, name: str) -> None:
        """Find out what a model needs, which reads its files, unless that is known."""
        model_id = self.resolve(name)
        if not self.is_measured(model_id):
            need = self._need(self._models[model_id].config)
            if need is not None:
                with self._lock:
                    self._residency.measured(model_id, need)

    def request(
        self,
        name: str,
        due_time: float | None = None,
        *,
        is_best_effort: bool = False,
        keep_alive: float | None = None,
    ) -> LeaseRequest:
        """Ask for the use of a model, which is loaded if it is not; the caller closes the request.

        due_time: the order among requests for models, on the engine's clock; None is now.
        is_best_effort: it waits behind all others, and no model in use makes room for it.
        keep_alive: see `Residency.ask`.

        Raises:
            ModelNotFound: no such model is served here.
        """
        self.measure(name)
        due_time = self._clock() if due_time is None else due_time
        request = LeaseRequest(
            self.resolve(name), due_time, self._leave, is_best_effort=is_best_effort
        )
        with self._lock:
            self._residency.ask(request.waiter, keep_alive)
            self._advance()
        return request

    def get(self, name: str) -> AsyncEngine:
        """Return the engine of a model; wait until it is loaded.

        It may be unloaded at any time: requests have a lease for as long as they use it.

        Raises:
            ModelNotFound: no such model is served here.
            ModelLoadError: the model cannot be found or read.
            ModelTooLarge: there is never room for it.
        """
        request = self.request(name)
        try:
            return request.future.result().engine
        finally:
            request.close()

    def loaded(self, name: str) -> AsyncEngine | None:
        """Return the engine of a model, or of an adapter's model, if it is loaded."""
        with suppress(ModelNotFound):
            return self.engines.get(self.resolve(name))
        return None

    def unload(self, name: str) -> None:
        """Let a model go when its requests have ended; does nothing if it is not loaded.

        Raises:
            ModelNotFound: no such model is served here.
            RequestError: it is divided among ranks, which would all end with it.
        """
        with self._lock:
            model_id = self.resolve(name)
            if self.health.is_divided:
                message = f"the model '{model_id}' is divided among ranks, and ends with the server"
                raise RequestError(message, "model")
            self._residency.unload(model_id)
            self._advance()

    def statuses(self) -> list[ModelStatus]:
        """Return the status of every model, the default first."""
        with self._lock:
            return [self._status(model, self._clock()) for model in self._models.values()]

    def tick(self) -> None:
        """Do what is due although nothing has happened; to be called about once a second."""
        with self._lock:
            self._advance()

    def close(self, timeout: float | None = None) -> None:
        """End all engines, waiting up to `timeout` seconds; open streams get EngineClosed."""
        with self._lock:
            self.is_closed = True
            self._residency.end()
            self._advance()
            self.listeners.tell()
        self._thread.stop(timeout)

    def _leave(self, request: LeaseRequest) -> None:
        with self._lock:
            self._residency.leave(request.waiter)
            self._advance()

    def _release(self, model_id: str) -> None:
        with self._lock:
            self._residency.release(model_id, self._clock())
            self._advance()

    def _advance(self) -> None:
        """Do what follows from what has happened, and tell the listeners of changes."""
        while actions := self._residency.actions(self._clock()):
            for action in actions:
                self._do(action)
        if self._num_changes != self._residency.num_changes:
            self._num_changes = self._residency.num_changes
            self.listeners.tell()

    def _do(self, action: Action) -> None:
        match action:
            case Begin(model_id, num_bytes):
                try:
                    self.engines.begin(
                        self._models[model_id], num_bytes, partial(self._load_ended, model_id)
                    )
                except EngineStopped as error:
                    self._residency.failed(model_id, error, self._clock())
            case Cancel(model_id):
                self.engines.cancel(model_id)
            case Close(model_id):
                ended = self.engines.end(model_id)
                ended.add_done_callback(lambda _: self._has_ended(model_id))
            case Grant(Waiter(model_id, token=future)):
                engine = self.engines.get(model_id)
                assert engine is not None, "a model that is granted is loaded"
                lease = Lease(engine, partial(self._release, model_id))
                if future.set_running_or_notify_cancel():
                    future.set_result(lease)
                else:
                    lease.release()
            case Refuse(Waiter(token=future), error) if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _load_ended(self, model_id: str) -> None:
        with self._lock:
            try:
                engine = self.engines.finish(model_id)
            except BaseException as error:
                failure = load_failure(model_id, error)
                self._residency.failed(model_id, failure, self._clock())
            else:
                self._residency.loaded(model_id, engine.memory.total, self._clock())
            self._advance()

    def _has_ended(self, model_id: str) -> None:
        with self._lock:
            self._residency.closed(model_id, self._clock())
            self._advance()

    def _status(self, model: ServedModel, now: float) -> ModelStatus:
        residency, model_id = self._residency, model.model_id
        state, error = residency.state(model_id), residency.error(model_id)
        expires = residency.expires(model_id)
        engine = self.engines.get(model_id)
        return ModelStatus(
            model,
            state,
            self.engines.progress(model_id),
            "" if state is not ModelState.FAILED or error is None else str(error),
            residency.num_leases(model_id),
            residency.num_waiting(model_id),
            None if expires is None else max(0.0, expires - now),
            None if engine is None else engine.memory,
        )

"""The engines of a server by model id: loaded on demand by one MLX thread, unloaded to make room."""

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from time import monotonic
from typing import Final

from batching.adapters.files.registry import AdapterRegistry, ServedAdapter
from batching.config import EngineConfig
from batching.engine.async_engine import AsyncEngine
from batching.engine.jobs import Load
from batching.engine.load_slices import LoadCancelled, LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.mlx_thread import MLXThread
from batching.errors import (
    AdapterError,
    EngineError,
    EngineStopped,
    ModelLoadError,
    ModelNotFound,
    RankLost,
    RequestError,
)
from batching.kv_cache.cache_events import CacheEventSink
from batching.models.actions import Action, Begin, Cancel, Close, Grant, Refuse, Waiter
from batching.models.lease import Lease, LeaseRequest
from batching.models.listeners import Listeners
from batching.models.model_state import MemoryNeed, ModelState
from batching.models.model_status import ModelStatus
from batching.models.residency import Residency
from batching.models.served_model import ServedModel
from batching.steps.observer import EngineObserver, Observers

logger = logging.getLogger(__name__)

DEFAULT_MIN_RESIDENT: Final = 5.0
_NO_LIMIT: Final = 1 << 62
# The most names that an unknown one is compared with, each in up to a millisecond.
_MAX_COMPARED: Final = 64

Build = Callable[[EngineConfig, LoadSlices], LoadedEngine]


class SchedulerManager:
    """One engine, and hence one scheduler and one KV pool, for each model that is loaded.

    `Residency` decides which models are loaded; the manager does what it decides, and tells it what has
    happened.  All methods may be called from any thread and none waits, except `get` and `close`.

    is_closed: no more models are loaded.
    listeners: they are told of every change of a model's state, and of the end.
    adapters: those that requests can name.
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
        self._build = build or _backend()
        self._lost = lost
        self._clock = clock
        self._thread = MLXThread(clock)
        self._observer_of: Callable[[str], EngineObserver] = lambda _: Observers()
        self._cache_event_sink: CacheEventSink | None = None
        # Guards all that follows, which any thread may change.
        self._lock = threading.RLock()
        self._residency = Residency(_NO_LIMIT if capacity is None else capacity, min_resident)
        for model in served:
            self._residency.add(
                model.model_id, is_pinned=model.is_pinned, idle_unload=model.idle_unload
            )
        self.is_closed = False
        self._engines: dict[str, AsyncEngine] = {}
        self._loads: dict[str, Load] = {}
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
            return self._engines.get(self.resolve(name))
        return None

    @property
    def engines(self) -> tuple[AsyncEngine, ...]:
        """The engines of the models that are loaded."""
        return tuple(self._engines.values())

    def unload(self, name: str) -> None:
        """Let a model go when its requests have ended; does nothing if it is not loaded.

        Raises:
            ModelNotFound: no such model is served here.
            RequestError: it is divided among ranks, which would all end with it.
        """
        with self._lock:
            model_id = self.resolve(name)
            if self.is_divided:
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

    @property
    def is_divided(self) -> bool:
        """Whether other processes have parts of the model; then there is no way on after a failure."""
        return self._lost is not None

    @property
    def lost_rank(self) -> RankLost | None:
        """Why the ranks can compute no more; None while they can."""
        return None if self._lost is None else self._lost()

    @property
    def unhealthy_reason(self) -> str | None:
        """Why no model can be loaded, as a message for the operator; None while the MLX thread and all ranks run."""
        if (lost := self.lost_rank) is not None:
            return str(lost)
        if self._thread.has_ended:
            return "the engine has stopped"
        limit = max(model.config.step_timeout for model in self._models.values())
        if (seconds := self._thread.busy_time) > limit:
            return f"a part of the load of a model has not ended for {seconds:.0f} s"
        return None

    def excuse(self, seconds: float) -> None:
        """Do not count seconds that have just passed as those of a step."""
        self._thread.excuse(seconds)

    def observe(self, observer_of: Callable[[str], EngineObserver]) -> None:
        """Attach an observer to every engine, loaded or not, made from its model id."""
        self._observer_of = observer_of
        for model_id, engine in self._engines.items():
            engine.observer = observer_of(model_id)

    def report_cache(self, sink: CacheEventSink) -> None:
        """Tell `sink` of the blocks of the default model that requests share; to be called before it is loaded.

        Events name no model, so that those of a second one could not be told from them.
        """
        self._cache_event_sink = sink

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
                self._begin(model_id, num_bytes)
            case Cancel(model_id):
                self._loads[model_id].cancel()
            case Close(model_id):
                ended = self._engines.pop(model_id).end()
                ended.add_done_callback(lambda _: self._has_ended(model_id))
            case Grant(Waiter(model_id, token=future)):
                lease = Lease(self._engines[model_id], partial(self._release, model_id))
                if future.set_running_or_notify_cancel():
                    future.set_result(lease)
                else:
                    lease.release()
            case Refuse(Waiter(token=future), error) if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _begin(self, model_id: str, num_bytes: int) -> None:
        # Where nothing is known of its size, its load sees what is free.
        config = replace(self._models[model_id].config, memory_budget=num_bytes or None)
        engine = AsyncEngine(
            self._builder(model_id, config), self._thread, step_timeout=config.step_timeout
        )
        engine.observer = self._observer_of(model_id)
        try:
            load = engine.begin()
        except EngineStopped as error:
            self._residency.failed(model_id, error, self._clock())
            return
        self._loads[model_id] = load
        load.future.add_done_callback(lambda _: self._load_ended(model_id, engine))

    def _builder(self, model_id: str, config: EngineConfig) -> Callable[[LoadSlices], LoadedEngine]:
        build = partial(self._build, config)
        sink = self._cache_event_sink
        if sink is None or model_id != self.model_ids[0]:
            return build
        return lambda slices: build(slices).reporting(sink)

    def _load_ended(self, model_id: str, engine: AsyncEngine) -> None:
        with self._lock:
            del self._loads[model_id]
            now = self._clock()
            try:
                engine.finish()
            except LoadCancelled:
                self._residency.failed(model_id, None, now)
            except EngineError as error:
                # Several may raise it.
                self._residency.failed(model_id, error.with_traceback(None), now)
            except BaseException as error:
                logger.exception("%s cannot be loaded", model_id)
                what = str(error) or type(error).__name__
                reason = ModelLoadError(f"cannot load {model_id}: {what}")
                self._residency.failed(model_id, reason, now)
            else:
                self._check_adapters(model_id, engine)
                self._engines[model_id] = engine
                self._residency.loaded(model_id, engine.memory.total, now)
            self._advance()

    def _check_adapters(self, model_id: str, engine: AsyncEngine) -> None:
        """Warn of adapters that do not fit; of those of a model that is loaded at the start the start says so."""
        if self._models[model_id].loads_at_start:
            return
        for adapter in self.adapters.of(model_id):
            try:
                engine.adapted(adapter.file)
            except AdapterError as error:
                logger.warning("%s", error)

    def _has_ended(self, model_id: str) -> None:
        with self._lock:
            self._residency.closed(model_id, self._clock())
            self._advance()

    def _status(self, model: ServedModel, now: float) -> ModelStatus:
        residency, model_id = self._residency, model.model_id
        state, error = residency.state(model_id), residency.error(model_id)
        expires = residency.expires(model_id)
        load, engine = self._loads.get(model_id), self._engines.get(model_id)
        return ModelStatus(
            model,
            state,
            0.0 if load is None else load.progress,
            "" if state is not ModelState.FAILED or error is None else str(error),
            residency.num_leases(model_id),
            residency.num_waiting(model_id),
            None if expires is None else max(0.0, expires - now),
            None if engine is None else engine.memory,
        )


def _backend() -> Build:
    """Import MLX and all that comes with it: seconds that `--help` does not need."""
    from batching.backend.builder.engine import build_engine

    return build_engine

"""The engines of models, from the begin of their loads to their ends, all in one MLX thread."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from batching.adapters.files.registry import AdapterRegistry
from batching.backend_calls.build import Build
from batching.config import EngineConfig
from batching.engine.async_engine import AsyncEngine
from batching.engine.jobs import Load
from batching.engine.load_slices import LoadCancelled, LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.mlx_thread import MLXThread
from batching.errors import AdapterError, EngineError, ModelLoadError
from batching.kv_cache.cache_events import CacheEventSink
from batching.models.served_model import ServedModel
from batching.steps.observer import EngineObserver, Observers

logger = logging.getLogger(__name__)


class _Loading(NamedTuple):
    model: ServedModel
    engine: AsyncEngine
    load: Load


class Engines:
    """The engines of the models that are loaded, and the loads of others.

    Any thread may use `loaded`, `get` and `progress`; the other methods are called one at a time.
    """

    def __init__(self, build: Build, thread: MLXThread, adapters: AdapterRegistry) -> None:
        """build: makes the engine of a configuration, in the MLX thread.

        adapters: those that requests can name.
        """
        self._build = build
        self._thread = thread
        self._adapters = adapters
        self._observer_of: Callable[[str], EngineObserver] = lambda _: Observers()
        self._sinks: dict[str, CacheEventSink] = {}
        self._loading: dict[str, _Loading] = {}
        self._loaded: dict[str, AsyncEngine] = {}

    @property
    def loaded(self) -> tuple[AsyncEngine, ...]:
        """The engines of the models that are loaded."""
        return tuple(self._loaded.values())

    def get(self, model_id: str) -> AsyncEngine | None:
        """Return the engine of a model, if it is loaded."""
        return self._loaded.get(model_id)

    def progress(self, model_id: str) -> float:
        """Return the share of a model's load that is done, in [0, 1]; 0 unless it is loading."""
        loading = self._loading.get(model_id)
        return 0.0 if loading is None else loading.load.progress

    def observe(self, observer_of: Callable[[str], EngineObserver]) -> None:
        """Attach an observer to every engine, loaded or not, made from its model id."""
        self._observer_of = observer_of
        for model_id, engine in self._loaded.items():
            engine.observer = observer_of(model_id)

    def report_cache(self, model_id: str, sink: CacheEventSink) -> None:
        """Tell `sink` of the blocks of a model that requests share; to be called before it is loaded.

        Events name no model, so that those of a second one could not be told from them.
        """
        self._sinks[model_id] = sink

    def begin(self, model: ServedModel, num_bytes: int, ended: Callable[[], None]) -> None:
        """Load a model; `ended` is called when `finish` is due, in any thread.

        num_bytes: the most that it may take; 0 where nothing is known of its size.

        Raises:
            EngineStopped: the MLX thread has ended.
        """
        # Where nothing is known of its size, its load sees what is free.
        config = replace(model.config, memory_budget=num_bytes or None)
        engine = AsyncEngine(self._builder(config), self._thread, step_timeout=config.step_timeout)
        engine.observer = self._observer_of(model.model_id)
        load = engine.begin()
        self._loading[model.model_id] = _Loading(model, engine, load)
        load.future.add_done_callback(lambda _: ended())

    def cancel(self, model_id: str) -> None:
        """End a load at its next pause."""
        self._loading[model_id].load.cancel()

    def finish(self, model_id: str) -> AsyncEngine:
        """Take the engine of a load that has ended.

        Raises:
            LoadCancelled: it was cancelled.
            BaseException: it has failed; see `load_failure`.
        """
        model, engine, _ = self._loading.pop(model_id)
        engine.finish()
        # Of the adapters of a model that is loaded at the start the start says so.
        if not model.loads_at_start:
            self._check_adapters(model_id, engine)
        self._loaded[model_id] = engine
        return engine

    def end(self, model_id: str) -> Future[None]:
        """Unload a model after the current step."""
        return self._loaded.pop(model_id).end()

    def _builder(self, config: EngineConfig) -> Callable[[LoadSlices], LoadedEngine]:
        build, sink = partial(self._build, config), self._sinks.get(config.model_id)
        return build if sink is None else lambda slices: build(slices).reporting(sink)

    def _check_adapters(self, model_id: str, engine: AsyncEngine) -> None:
        """Warn of adapters that do not fit."""
        for adapter in self._adapters.of(model_id):
            try:
                engine.adapted(adapter.file)
            except AdapterError as error:
                logger.warning("%s", error)


def load_failure(model_id: str, error: BaseException) -> EngineError | None:
    """Return what those get who wait for a model, after `finish` has raised; None if the load was cancelled."""
    if isinstance(error, LoadCancelled):
        return None
    if isinstance(error, EngineError):
        # Several may raise it.
        return error.with_traceback(None)
    logger.error("%s cannot be loaded", model_id, exc_info=error)
    return ModelLoadError(f"cannot load {model_id}: {str(error) or type(error).__name__}")

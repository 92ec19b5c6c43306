"""The engines of a server by model id: loaded on first use, closed together."""

import threading
from collections.abc import Callable, Iterable
from functools import partial

from batching.config import EngineConfig
from batching.engine.async_engine import AsyncEngine
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.mlx_thread import MLXThread
from batching.errors import ModelNotFound
from batching.steps.observer import EngineObserver, Observers


class SchedulerManager:
    """One engine thread, and hence one scheduler and one KV pool, for each served model.

    `get` may be called from any thread and blocks while the model is loaded.
    """

    def __init__(
        self,
        configs: Iterable[EngineConfig],
        build: Callable[[EngineConfig, LoadSlices], LoadedEngine] | None = None,
    ) -> None:
        """Serve the models of these configurations; the first one is the default.

        build: makes the engine of a configuration, in the engine's thread; None is the MLX backend.
        """
        self._configs = {config.model_id: config for config in configs}
        self._build = build or _backend()
        self._thread = MLXThread()
        self._threads: dict[str, AsyncEngine] = {}
        # Held while a model loads, so that it is loaded once.
        self._lock = threading.Lock()
        self._observer_of: Callable[[str], EngineObserver] = lambda _: Observers()

    @property
    def model_ids(self) -> tuple[str, ...]:
        """The ids of the served models; the first one is the default."""
        return tuple(self._configs)

    def get(self, model_id: str) -> AsyncEngine:
        """Return the engine of a model; the first call loads the model and waits for that.

        Raises:
            ModelNotFound: no such model is served here.
            ModelLoadError: the model cannot be found or read.
        """
        if (config := self._configs.get(model_id)) is None:
            raise ModelNotFound(model_id)
        if (thread := self._threads.get(model_id)) is not None:
            return thread
        with self._lock:
            if model_id not in self._threads:
                thread = AsyncEngine(
                    partial(self._build, config), self._thread, step_timeout=config.step_timeout
                )
                thread.observer = self._observer_of(model_id)
                thread.start()
                self._threads[model_id] = thread
            return self._threads[model_id]

    def loaded(self, model_id: str) -> AsyncEngine | None:
        """Return the engine of a model if it is loaded."""
        return self._threads.get(model_id)

    @property
    def engines(self) -> tuple[AsyncEngine, ...]:
        """The engines of the models that are loaded."""
        return tuple(self._threads.values())

    def observe(self, observer_of: Callable[[str], EngineObserver]) -> None:
        """Attach an observer to every engine, loaded or not, made from its model id."""
        self._observer_of = observer_of
        for model_id, thread in self._threads.items():
            thread.observer = observer_of(model_id)

    def close(self, timeout: float | None = None) -> None:
        """End all engines, waiting up to `timeout` seconds; open streams get EngineClosed."""
        self._thread.stop(timeout)


def _backend() -> Callable[[EngineConfig, LoadSlices], LoadedEngine]:
    """Import MLX and all that comes with it: seconds that `--help` does not need."""
    from batching.backend.builder.engine import build_engine

    return build_engine

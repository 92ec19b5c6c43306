"""What makes the engine of a model."""

from collections.abc import Callable

from batching.config import EngineConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine

Build = Callable[[EngineConfig, LoadSlices], LoadedEngine]


def backend_build() -> Build:
    """Import MLX and all that comes with it: seconds that `--help` does not need."""
    from batching.backend.builder.engine import build_engine

    return build_engine

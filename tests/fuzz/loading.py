"""What loading a file or directory of a model may end with."""

import atexit
from pathlib import Path
from tempfile import TemporaryDirectory

import batching.backend  # noqa: F401 - before MLX: a fast BLAS must be loaded first
from batching.backend.loader import load_model
from batching.errors import ModelLoadError


def new_folder() -> Path:
    """Return a folder that goes with the process."""
    folder = TemporaryDirectory(prefix="model-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def load(path: Path) -> None:
    """Load a model, or reject it: in one line, and within the memory there is."""
    if (rejection := _rejection(path)) is not None:
        assert "\n" not in str(rejection), str(rejection)
        assert not isinstance(rejection.__cause__, MemoryError), str(rejection)


def _rejection(path: Path) -> ModelLoadError | None:
    try:
        load_model(str(path), dtype=None)
    except ModelLoadError as error:
        return error
    return None

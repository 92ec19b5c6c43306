import mlx.core as mx
import pytest

from batching.backend.loader import BUNDLED_MODEL, LoadedModel, load_model


@pytest.fixture(scope="session")
def bundled_model() -> LoadedModel:
    """The bundled model in float32, as a Linux CPU serves it."""
    return load_model(BUNDLED_MODEL, dtype=mx.float32)

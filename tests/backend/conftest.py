import platform
from pathlib import Path

import mlx.core as mx
import pytest

from batching.backend import kv_cache
from batching.backend.loader import BUNDLED_MODEL, LoadedModel, load_model
from batching.backend.native.build import why_not
from batching.backend.native.extension import Native, NoNative, load_native
from tests.backend.model_files import write_model


@pytest.fixture(scope="session")
def bundled_model() -> LoadedModel:
    """The bundled model in float32, as a Linux CPU serves it."""
    return load_model(BUNDLED_MODEL, dtype=mx.float32)


@pytest.fixture(scope="session")
def native() -> Native:
    """The native kernels; where a compiler is, `make install` has built them."""
    found = load_native("auto")
    if isinstance(found, NoNative):
        if why_not() is None:
            pytest.fail(str(found))
        pytest.skip(str(found))
    return found


@pytest.fixture(params=["on any device", "on an x86 CPU"])
def device_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve by MLX alone, as on a GPU, and with numpy's help."""
    if request.param == "on any device":
        monkeypatch.setattr(kv_cache, "_SCALAR_MACHINES", ())
    elif platform.machine() not in kv_cache._SCALAR_MACHINES:
        pytest.skip("not an x86 CPU")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path)

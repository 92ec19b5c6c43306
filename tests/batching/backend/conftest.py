import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from batching.backend.devices import Gpu, default_gpu
from batching.backend.platforms.cpu.native_loader import Native, NoNative, load_native
from batching.backend.self_check.long_steps import MIN_TOKENS
from tests.support.host_kernels import HostKernels
from tests.support.model_files import write_model
from tests.support.platforms import check_model, use_kernels
from tests.support.tiny_models import DEVICE_KINDS, Check


def has_compiler() -> bool:
    return sys.platform == "linux" and shutil.which(os.environ.get("CXX", "c++")) is not None


@pytest.fixture(scope="session")
def native() -> Native:
    """The native kernels; where a compiler is, `make install` has built them."""
    found = load_native("auto")
    if isinstance(found, NoNative):
        # Else this machine has no use for them: another processor, or a GPU.
        if has_compiler() and "is not installed" in found.reason:
            pytest.fail(str(found))
        pytest.skip(str(found))
    return found


@pytest.fixture(params=DEVICE_KINDS)
def device_kind(request: pytest.FixtureRequest) -> Check:
    """Return what checks a model to be served: by MLX alone, on the native kernels, or on those of a GPU.

    It takes a model, the size of its vocabulary, and perhaps a type of the keys and values.
    """
    if request.param == "with native kernels":
        native = request.getfixturevalue("native")
        return lambda model, size, kv_dtype=None: check_model(
            use_kernels(model, native), size, native, kv_dtype
        )
    if request.param == "with a GPU's kernels":
        kernels = HostKernels(request.getfixturevalue("native"))
        # Long contexts have tests of their own.
        length = MIN_TOKENS - 1
        return partial(check_model, gpu=Gpu.METAL, kernels=kernels, max_model_len=length)
    return partial(check_model, gpu=default_gpu())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path)

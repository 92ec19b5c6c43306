"""What bounds every kernel on this machine, measured by roofline.cpp."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from batching.backend.native import build
from batching.errors import ModelLoadError

_SOURCE: Final = Path(__file__).with_suffix(".cpp")
_NATIVE: Final = build.FOLDER / "src"


class Roofline(NamedTuple):
    """What all threads reach per second; a multiplication and an addition are two operations."""

    flops: float
    bytes_read: float


def measure_roofline(num_threads: int) -> Roofline:
    """Compile and run the measurement.

    Raises:
        ModelLoadError: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ModelLoadError(f"no roofline: there is no C++ compiler ({compiler})")
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "roofline"
        sources = [_SOURCE, _NATIVE / "memory.cpp", _NATIVE / "thread_pool.cpp"]
        options = ["-std=gnu++20", "-O3", "-march=native", "-pthread", f"-I{_NATIVE}"]
        subprocess.run([compiler, *options, *sources, "-o", program], check=True)
        printed = subprocess.run(
            [program, str(num_threads)], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    return Roofline(*map(float, printed.split()))

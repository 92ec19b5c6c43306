"""What bounds every kernel on this machine, measured by roofline.cpp."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from batching.errors import ModelLoadError

_SOURCE: Final = Path(__file__).with_suffix(".cpp")
_NATIVE: Final = Path(__file__).parents[1] / "src"


class Case(NamedTuple):
    """What is computed, in operations and in bytes of memory read; `bits` of the numbers multiplied."""

    run: Callable[[], object]
    num_flops: float
    num_bytes: float
    bits: int = 32


class Roofline(NamedTuple):
    """What all threads reach per second; a multiplication and an addition are two operations.

    Those of bfloat16 and of 16-bit integers are 0 where no instruction has them.
    """

    float_flops: float
    bytes_read: float
    bfloat16_flops: float
    int16_flops: float

    def flops(self, bits: int) -> float:
        """Return those of products with numbers stored in so many bits."""
        products = {16: self.bfloat16_flops, 8: self.int16_flops}
        return products.get(bits, 0.0) or self.float_flops


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

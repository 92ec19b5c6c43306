"""A fast BLAS under MLX on a Linux CPU.

MLX's CPU wheel carries the reference BLAS and calls `cblas_sgemm` through the dynamic linker:
whichever library is first in the global scope provides it. So an OpenBLAS loaded with RTLD_GLOBAL
before the first `import mlx.core` replaces it, and float32 products run some 80 times faster.
"""

import ctypes
import importlib.metadata
import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CUDA_PACKAGES: Final = ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")
_SONAME: Final = "libopenblas.so.0"

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


class _NotInstalled(Exception):
    """There is no such library."""


@dataclass(frozen=True, slots=True)
class Blas:
    """The OpenBLAS that MLX calls."""

    source: str
    version: str
    core: str
    num_threads: int

    def __str__(self) -> str:
        return f"{self.version} ({self.core} kernels, {self.num_threads} threads)"


@dataclass(frozen=True, slots=True)
class NoBlas:
    """Nothing was loaded; `is_slow` if float32 products suffer from it."""

    reason: str
    is_slow: bool

    def __str__(self) -> str:
        return self.reason


def load_blas() -> Blas | NoBlas:
    """Load the first OpenBLAS that is found into the global scope of the dynamic linker."""
    if (unwanted := _why_unwanted()) is not None:
        return unwanted
    reason = "no OpenBLAS was found: install ngsolve-openblas or libopenblas0"
    for load in (_load_package, _load_package_with_bundled_runtime, _load_system):
        try:
            return _describe(*load())
        except _NotInstalled:
            continue
        except (OSError, AttributeError) as error:
            reason = f"OpenBLAS cannot be loaded: {error}"
    return NoBlas(reason, is_slow=True)


def keep_freed_memory() -> bool:
    """Tell glibc to keep large freed buffers; False, and no change, under another C library.

    MLX frees its temporaries at once. Handing them back to the system costs page faults at the
    next step, which is most of the time that a gather takes.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    # Older versions refuse more than half a heap, 32 MiB, and then change nothing.
    kept = libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30) or libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    return bool(kept and libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


def _why_unwanted() -> NoBlas | None:
    if sys.platform != "linux":
        return NoBlas("MLX uses the system's own BLAS here", is_slow=False)
    if any(map(_is_installed, _CUDA_PACKAGES)):
        return NoBlas("MLX computes on a CUDA device", is_slow=False)
    if "mlx.core" in sys.modules:
        return NoBlas("mlx.core was imported before batching.backend: too late", is_slow=True)
    return None


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _describe(library: ctypes.CDLL, source: str) -> Blas:
    library.openblas_get_config.restype = ctypes.c_char_p
    library.openblas_get_corename.restype = ctypes.c_char_p
    return Blas(
        source=source,
        # The first two words are name and version; the rest are build options.
        version=" ".join(library.openblas_get_config().decode().split()[:2]),
        core=library.openblas_get_corename().decode(),
        num_threads=library.openblas_get_num_threads(),
    )


def _load_package() -> tuple[ctypes.CDLL, str]:
    """Load the package's library; it needs libgfortran from the system."""
    path = _packaged_openblas()
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL), path.name


def _load_package_with_bundled_runtime() -> tuple[ctypes.CDLL, str]:
    """Load the package's library with the Fortran runtime that MLX's wheel carries.

    That runtime has a mangled file name, and OpenBLAS looks for `libgfortran.so.5` in its own
    directory: a directory of links shows both under the names that the linker asks for.
    """
    path = _packaged_openblas()
    ctypes.CDLL(str(_bundled("libquadmath-*.so*")))
    with tempfile.TemporaryDirectory() as directory:
        links = Path(directory)
        (links / "libgfortran.so.5").symlink_to(_bundled("libgfortran-*.so.5*"))
        (links / _SONAME).symlink_to(path)
        return ctypes.CDLL(str(links / _SONAME), mode=ctypes.RTLD_GLOBAL), path.name


def _load_system() -> tuple[ctypes.CDLL, str]:
    try:
        return ctypes.CDLL(_SONAME, mode=ctypes.RTLD_GLOBAL), _SONAME
    except OSError as error:
        # The linker's error says no more than its text.
        raise _NotInstalled from error


def _packaged_openblas() -> Path:
    return _first(_package_directories("ngsolve_openblas"), "libopenblas*.so*")


def _bundled(pattern: str) -> Path:
    parents = [directory.parent / "mlx_cpu.libs" for directory in _package_directories("mlx")]
    return _first(parents, pattern)


def _package_directories(package: str) -> list[Path]:
    """Find a package without importing it."""
    spec = importlib.util.find_spec(package)
    return [Path(location) for location in (spec and spec.submodule_search_locations) or ()]


def _first(directories: list[Path], pattern: str) -> Path:
    for directory in directories:
        for path in sorted(directory.glob(pattern)):
            return path
    raise _NotInstalled(pattern)

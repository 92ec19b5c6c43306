"""The BLAS under MLX: loaded first, really used, and no condition for running."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batching.backend import BLAS
from batching.backend.processor.blas import Blas, NoBlas, load_blas

ROOT = Path(__file__).parents[4]

needs_blas = pytest.mark.skipif(not isinstance(BLAS, Blas), reason=f"{BLAS}")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own: what is loaded first decides."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )


@needs_blas
def test_mlx_calls_the_loaded_openblas(tmp_path: Path) -> None:
    code = """
import batching.backend
import mlx.core as mx
mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
"""
    run(code, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "linker"))
    lines = "".join(path.read_text() for path in tmp_path.iterdir()).splitlines()
    bindings = [line for line in lines if "libmlx" in line and "`cblas_sgemm'" in line]
    assert bindings
    assert all("openblas" in line.partition(" to ")[2] for line in bindings)


@needs_blas
def test_the_global_scope_has_its_symbols() -> None:
    code = """
import ctypes
import batching.backend
import mlx.core
scope = ctypes.CDLL(None)
scope.openblas_get_config.restype = ctypes.c_char_p
scope.cblas_sgemm
print(scope.openblas_get_config().decode())
"""
    assert run(code).stdout.startswith("OpenBLAS")


def test_the_servers_import_works_without_the_package() -> None:
    code = """
import sys
sys.modules["ngsolve_openblas"] = None
from batching.backend import BLAS
import mlx.core as mx
print((mx.ones((2, 2)) @ mx.ones((2, 2))).tolist())
assert "ngsolve" not in str(BLAS) or "install" in str(BLAS)
"""
    assert run(code).stdout.strip() == "[[2.0, 2.0], [2.0, 2.0]]"


def test_the_reason_why_an_installed_openblas_is_not_loaded_is_kept() -> None:
    """On a read-only file system there is no folder for the links."""
    code = """
import ctypes, sys, tempfile
from pathlib import Path
from batching.backend.processor import blas

def fail(*_, **__):
    raise OSError("it cannot be opened")

def read_only():
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

sys.platform = "linux"
del sys.modules["mlx.core"]
blas._packaged_openblas = lambda: Path("libopenblas.so")
blas._bundled = lambda _: Path("libquadmath.so")
blas._is_installed = lambda _: False
ctypes.CDLL = fail
print(blas.load_blas())
ctypes.CDLL = lambda name, mode=0: None if "quadmath" in name else fail()
tempfile.TemporaryDirectory = read_only
print(blas.load_blas())
"""
    failed, read_only = run(code).stdout.splitlines()
    reason = "OpenBLAS cannot be loaded: "
    assert failed == f"{reason}it cannot be opened"
    assert read_only == f"{reason}[Errno 2] No usable temporary directory found in ['/tmp']"


def test_the_limit_of_open_files_stays() -> None:
    code = """
import resource
before = resource.getrlimit(resource.RLIMIT_NOFILE)
import batching.backend
print(before == resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert run(code).stdout.strip() == "True"


def test_once_mlx_is_imported_it_is_too_late() -> None:
    # This process has imported mlx.core by now, through the package.
    again = load_blas()
    assert isinstance(again, NoBlas)
    assert sys.platform != "linux" or not again.is_slow or "before" in again.reason

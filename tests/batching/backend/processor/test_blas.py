"""The BLAS under MLX: loaded first, really used, and no condition for running."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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


class Started(NamedTuple):
    """What a process that imports the server's package knows, and what its linker has bound."""

    blas: str
    limits: list[list[int]]
    bindings: list[str]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Started:
    code = """
import ctypes, json, resource
before = resource.getrlimit(resource.RLIMIT_NOFILE)
import batching.backend
import mlx.core as mx
after = resource.getrlimit(resource.RLIMIT_NOFILE)
mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
scope = ctypes.CDLL(None)
found = hasattr(scope, "openblas_get_config") and hasattr(scope, "cblas_sgemm")
if found:
    scope.openblas_get_config.restype = ctypes.c_char_p
print(json.dumps([scope.openblas_get_config().decode() if found else "", [before, after]]))
"""
    folder = tmp_path_factory.mktemp("linker")
    done = run(code, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(folder / "log"))
    blas, limits = json.loads(done.stdout)
    lines = "".join(path.read_text() for path in folder.iterdir()).splitlines()
    sgemm = [line for line in lines if "libmlx" in line and "`cblas_sgemm'" in line]
    return Started(blas, limits, sgemm)


@needs_blas
def test_mlx_calls_the_loaded_openblas(started: Started) -> None:
    assert started.bindings
    assert all("openblas" in line.partition(" to ")[2] for line in started.bindings)


@needs_blas
def test_the_global_scope_has_its_symbols(started: Started) -> None:
    assert started.blas.startswith("OpenBLAS")


def test_the_limit_of_open_files_stays(started: Started) -> None:
    before, after = started.limits
    assert before == after


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


def test_once_mlx_is_imported_it_is_too_late() -> None:
    # This process has imported mlx.core by now, through the package.
    again = load_blas()
    assert isinstance(again, NoBlas)
    assert sys.platform != "linux" or not again.is_slow or "before" in again.reason

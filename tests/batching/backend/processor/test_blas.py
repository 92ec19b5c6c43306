"""The BLAS under MLX: loaded first, really used, and no condition for running."""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from batching.backend import BLAS
from batching.backend.processor import blas
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

    config: str
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
    config, limits = json.loads(done.stdout)
    lines = "".join(path.read_text() for path in folder.iterdir()).splitlines()
    sgemm = [line for line in lines if "libmlx" in line and "`cblas_sgemm'" in line]
    return Started(config, limits, sgemm)


@needs_blas
def test_mlx_calls_the_loaded_openblas(started: Started) -> None:
    assert started.bindings
    assert all("openblas" in line.partition(" to ")[2] for line in started.bindings)


@needs_blas
def test_the_global_scope_has_its_symbols(started: Started) -> None:
    assert started.config.startswith("OpenBLAS")


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


def test_the_reason_why_an_installed_openblas_is_not_loaded_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a read-only file system there is no folder for the links."""

    loadable: list[str] = []

    def load(name: str, mode: int = 0) -> None:
        if name not in loadable:
            raise OSError("it cannot be opened")

    def no_folder() -> None:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    # As before MLX is imported, on Linux.
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(blas, "_is_installed", lambda _: False)
    monkeypatch.setattr(blas, "_packaged_openblas", lambda: Path("libopenblas.so"))
    monkeypatch.setattr(blas, "_bundled", lambda _: Path("libquadmath.so"))
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_folder)
    reason = "OpenBLAS cannot be loaded: "
    assert str(load_blas()) == f"{reason}it cannot be opened"
    loadable.append("libquadmath.so")
    no_folder_reason = "[Errno 2] No usable temporary directory found in ['/tmp']"
    assert str(load_blas()) == f"{reason}{no_folder_reason}"


def test_once_mlx_is_imported_it_is_too_late() -> None:
    # This process has imported mlx.core by now, through the package.
    again = load_blas()
    assert isinstance(again, NoBlas)
    assert sys.platform != "linux" or not again.is_slow or "before" in again.reason

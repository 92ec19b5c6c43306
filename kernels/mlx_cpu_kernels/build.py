"""Builds the extension into this package, against the installed MLX.

`python -m mlx_cpu_kernels.build` always succeeds: without a compiler, or if the build
fails, it prints the reason, and the server runs without the extension.  It builds for all
instruction sets, so that the file can be used on other machines; with --host for the best one of
this processor and the least, which is faster.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1]
PACKAGE: Final = Path(__file__).parent.name
NAME: Final = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
# Of the output of a failed build: the last lines have the reason.
_NUM_LINES: Final = 20


def main(arguments: Sequence[str] = ()) -> int:
    """Return 0, whether the extension was built or not: the server runs without it too."""
    parser = argparse.ArgumentParser(description="Build the native CPU kernels.")
    parser.add_argument("--host", action="store_true", help="for this processor alone")
    options = ["-DNATIVE_ISAS=fastest;avx2"] if parser.parse_args(arguments).host else []
    if (reason := why_not()) is not None:
        print(f"no native CPU kernels: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        error = build(Path(directory), *options)
        if error is None:
            # Atomic: a server that is starting finds either the old file or the new one.
            package = FOLDER / PACKAGE
            os.replace(shutil.copy(Path(directory) / NAME, package / f"{NAME}.new"), package / NAME)
    if error is not None:
        print(error, file=sys.stderr)
        print("no native CPU kernels: the build failed, see above")
    else:
        print("native CPU kernels are built")
    return 0


def why_not() -> str | None:
    """Return why the extension cannot be built here, or None."""
    if sys.platform != "linux":
        return "they are for Linux; on a Mac MLX computes on the GPU"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler})"
    for package in ("cmake", "nanobind", "ninja"):
        if shutil.which(package, path=_path()) is None and not _is_importable(package):
            return f"there is no {package}: pip install -r requirements/native.txt"
    return None


def build(directory: Path, *options: str) -> str | None:
    """Build in a directory, with further options of CMake; return the output of a failed build."""
    import mlx.core as mx
    import nanobind

    mlx = Path(mx.__file__).parent
    configure = [
        "cmake",
        *("-S", str(FOLDER), "-B", str(directory), "-G", "Ninja"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        f"-DMLX_DIR={mlx / 'share' / 'cmake' / 'MLX'}",
        *options,
    ]
    for command in (configure, ["cmake", "--build", str(directory)]):
        done = subprocess.run(
            command,
            env={**os.environ, "PATH": _path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            return "\n".join(done.stdout.splitlines()[-_NUM_LINES:])
    return None


def _path() -> str:
    """Return PATH with the programs of this environment first, even if it is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _is_importable(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The only modules that import MLX.

Importing this package loads a fast BLAS and sets what MLX reads from the environment, which has to come
before the first `import mlx.core`: import it before anything that imports mlx.
"""

import importlib
import os
import resource
import sys
from collections.abc import MutableMapping
from typing import Final

from batching.backend.processor.blas import Blas, NoBlas, keep_freed_memory, load_blas

# More than the arrays of a few layers have: what bounds a buffer then is the number of its operations.
_MAX_MB_PER_BUFFER: Final = 4096


def let_buffers_grow(platform: str, environ: MutableMapping[str, str]) -> None:
    """Let MLX put more than a layer into a command buffer of Metal, unless the user has set how much.

    It commits one when the arrays that are read have 40 or 50 million elements, and each layer's part of the
    pool, which counts as a whole, may have more.
    """
    if platform == "darwin":
        environ.setdefault("MLX_MAX_MB_PER_BUFFER", str(_MAX_MB_PER_BUFFER))


def _import_mlx_lm() -> None:
    """Import mlx-lm without its change to this process.

    It sets the limit of open files to 2048, and the hard limit to 4096: a server could never
    hold more connections again, and where the hard limit is lower the import itself fails.
    """
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = setrlimit


let_buffers_grow(sys.platform, os.environ)
BLAS: Final[Blas | NoBlas] = load_blas()
keep_freed_memory()
_import_mlx_lm()

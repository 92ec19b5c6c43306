"""The only modules that import MLX.

Importing this package loads a fast BLAS, which has to come before the first `import mlx.core`:
import it before anything that imports mlx.
"""

import importlib
import resource
from typing import Final

from batching.backend.processor.blas import Blas, NoBlas, keep_freed_memory, load_blas


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


BLAS: Final[Blas | NoBlas] = load_blas()
keep_freed_memory()
_import_mlx_lm()

"""Who computes on which core: MLX and its BLAS in turn with these threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, TypeVar

from threadpoolctl import ThreadpoolController

from batching.backend import BLAS
from batching.backend.blas import Blas

T = TypeVar("T")

NUM_THREADS: Final = BLAS.num_threads if isinstance(BLAS, Blas) else 1
_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="cpu-attention")


@cache
def make_numpy_single_threaded() -> None:
    """Let numpy's own BLAS compute in the calling thread.

    Its waiting threads spin, and so do those of MLX's BLAS: on the same cores they take each
    other's time, and a product of numpy's takes twice as long.
    """
    for library in ThreadpoolController().lib_controllers:
        if "numpy" in library.filepath:
            library.set_num_threads(1)


def for_each(func: Callable[[T], None], items: Sequence[T]) -> None:
    """Call `func` on all items, in several threads if there are many."""
    if len(items) < 2 * NUM_THREADS:
        for item in items:
            func(item)
    else:
        # The list has an exception raised here.
        list(_threads.map(func, items))

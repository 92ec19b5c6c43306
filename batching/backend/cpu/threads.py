"""Which library computes on which core."""

from functools import cache

from threadpoolctl import ThreadpoolController


@cache
def make_numpy_single_threaded() -> None:
    """Let numpy's own BLAS compute in the calling thread.

    Its waiting threads spin, and so do those of MLX's BLAS: on the same cores they take each
    other's time, and a product of numpy's takes twice as long.
    """
    for library in ThreadpoolController().lib_controllers:
        if "numpy" in library.filepath:
            library.set_num_threads(1)

"""Groups of no weights: MLX divides by the size of a group, and one of zero would end the process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx

_quantize: Final = mx.quantize
_lock: Final = threading.Lock()
_num_loads = 0


@contextmanager
def empty_groups_rejected() -> Iterator[None]:
    """Let mx.quantize raise ValueError for a group size of zero, in all threads, while models are loaded.

    A config may say so, or mlx-lm may work it out from scales that are wider than their matrix.
    """
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _num_loads
    with _lock:
        _num_loads += change
        mx.quantize = _checked if _num_loads else _quantize


def _checked(weight: mx.array, group_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
    if group_size == 0:
        raise ValueError("weights in groups of 0")
    return _quantize(weight, group_size, *args, **kwargs)

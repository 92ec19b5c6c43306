"""Groups of no weights: MLX divides by the size of a group, and one of zero would end the process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


@contextmanager
def empty_groups_rejected() -> Iterator[None]:
    """Let mx.quantize raise ValueError for a group size of zero.

    A config may say so, or mlx-lm may work it out from scales that are wider than their matrix.
    """
    quantize = mx.quantize

    def checked(weight: mx.array, group_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if group_size == 0:
            raise ValueError("weights in groups of 0")
        return quantize(weight, group_size, *args, **kwargs)

    try:
        mx.quantize = checked
        yield
    finally:
        mx.quantize = quantize

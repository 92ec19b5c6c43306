"""Faults of one rank, and how its weights are kept, planted in its process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import mlx.core as mx

from batching.backend.platforms.mlx import MLXPlatform
from batching.backend.runner.mlx_runner import MLXRunner

# A step in the middle of a few requests.
_STEP: Final = 7
# More than a row of a tiny model, and less than a chunk of a prompt.
_LARGE: Final = 4096


@contextmanager
def member_fails() -> Iterator[None]:
    """Fail in one of the steps that another rank has planned."""
    with patch.object(MLXRunner, "follow", _failing(MLXRunner.follow)):
        yield


@contextmanager
def leader_fails() -> Iterator[None]:
    """Fail in a step before anything is computed, while the others compute it."""
    plain, numbered = MLXRunner._passed, _failing(MLXRunner._passed)

    def passed(self: MLXRunner, *args: Any) -> Any:
        return plain(self, *args) if self.lockstep is None else numbered(self, *args)

    with patch.object(MLXRunner, "_passed", passed):
        yield


def _failing(plain: Callable[..., Any]) -> Callable[..., Any]:
    num_calls = 0

    def call(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == _STEP:
            raise RuntimeError("a planted fault")
        return plain(*args)

    return call


@contextmanager
def large_sums_are_wrong() -> Iterator[None]:
    """Add up what is large as if this rank's part had not arrived the second time."""
    plain, sizes = mx.distributed.all_sum, set[int]()

    def all_sum(array: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        total = plain(array, *args, **kwargs)
        is_first = array.size not in sizes
        sizes.add(array.size)
        return total if is_first or array.size < _LARGE else total * 0.5

    with patch.object(mx.distributed, "all_sum", all_sum):
        yield


@contextmanager
def weights_as_stored() -> Iterator[None]:
    """Keep quantized weights quantized, as on a GPU."""
    with patch.object(MLXPlatform, "weights_dtype", None):
        yield

"""Finds how much memory the device has for the weights and the KV pool."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import mlx.core as mx

from batching.errors import ModelLoadError
from batching.host.memory import available_memory, memory_limit

MIB: Final = 1 << 20
# Names that the devices of MLX have for the memory that arrays may use.
_DEVICE_KEYS: Final = ("max_recommended_working_set_size", "total_memory", "memory_size")


_NO_LIMIT: Final = 1 << 62
_limit = _NO_LIMIT
_others: Final[dict[str, Callable[[], int]]] = {}


def device_memory() -> int:
    """Return the bytes that the default device has for arrays, those that are in use included.

    They are no more than the operator allows, see `limit_memory`.
    """
    return min(_total_memory(), _limit)


def limit_memory(num_bytes: int | None) -> None:
    """Use no more than so many bytes for all models of this process; None is no limit."""
    global _limit
    _limit = _NO_LIMIT if num_bytes is None else num_bytes


def _total_memory() -> int:
    if mx.default_device() != mx.cpu:
        info = mx.device_info()
        for key in _DEVICE_KEYS:
            if key in info:
                return int(info[key])
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, memory_limit() or physical)


def count_too(name: str, num_bytes: Callable[[], int]) -> None:
    """Count memory that MLX does not know, from now on.

    num_bytes: returns how much there is under this name.
    """
    _others[name] = num_bytes


def memory_in_use() -> int:
    """Return the bytes of MLX's arrays, and of all that counts, too."""
    return mx.get_active_memory() + sum(num_bytes() for num_bytes in _others.values())


def free_memory() -> int:
    """Return the bytes that more arrays can use on the default device."""
    free_buffers()
    left = max(0, device_memory() - memory_in_use())
    if mx.default_device() == mx.cpu:
        available = available_memory()
        return left if available is None else min(left, available)
    # Only CUDA says what other processes have left.
    return min(left, int(mx.device_info().get("free_memory", left)))


def free_buffers() -> None:
    """Free the buffers that no array uses any more, after the device has finished its work.

    A GPU keeps the inputs of its work until then, also those of a step that has raised.  The error of
    such work is raised by the next call that waits; it belongs to that step and is ignored here.
    """
    for _ in range(2):
        with suppress(Exception):
            mx.synchronize()
    mx.clear_cache()


def bytes_within(fraction: float) -> int:
    """Return how many bytes this share of the device's memory still has for new arrays."""
    return max(0, int(fraction * device_memory()) - memory_in_use())


def check_room(num_bytes: int, name: str, advice: str, *, used: int | None = None) -> None:
    """Check that `num_bytes` can fit on the device; whether they do, only the system knows.

    used: the bytes of everything else; None is what is in use now.

    Raises:
        ModelLoadError: they can never fit; the message names what `name` is, and `advice`.
    """
    total = device_memory()
    left = total - (memory_in_use() if used is None else used)
    if num_bytes > left:
        raise ModelLoadError(
            f"{-(-num_bytes // MIB)} MiB of {name} do not fit into the {left // MIB} MiB that are "
            f"left of {total // MIB} MiB: {advice}"
        )

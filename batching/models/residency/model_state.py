"""The states of a model, and what is known of it in each."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class ModelState(StrEnum):
    """Where a model is between the disk and the device; `TRANSITIONS` has the legal changes.

    UNLOADED: it takes no memory.
    LOADING: its bytes are reserved, and the MLX thread loads it.
    LOADED: it serves requests.
    DRAINING: its requests end, new ones wait; then it is unloaded.
    FAILED: the last load failed; another one may be tried.
    """

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"
    FAILED = "failed"


TRANSITIONS: Final[dict[ModelState, frozenset[ModelState]]] = {
    ModelState.UNLOADED: frozenset({ModelState.LOADING}),
    # Back to UNLOADED if no request waits for it any more.
    ModelState.LOADING: frozenset({ModelState.LOADED, ModelState.FAILED, ModelState.UNLOADED}),
    ModelState.LOADED: frozenset({ModelState.DRAINING}),
    # Back to LOADED if its room is not needed any more.
    ModelState.DRAINING: frozenset({ModelState.UNLOADED, ModelState.LOADED}),
    ModelState.FAILED: frozenset({ModelState.LOADING}),
}


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The bytes that a model takes on the device, as far as its files tell.

    least: of its weights and of the smallest pool.
    wanted: of its weights and of the pool that the settings ask for; at least `least`.
    """

    least: int = 0
    wanted: int = 0

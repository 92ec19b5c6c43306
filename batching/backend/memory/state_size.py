"""Calculates how many recurrent states fit: those of running requests and those of the prefix cache."""

from dataclasses import dataclass
from typing import Final

from batching.backend.memory.device import MIB, free_memory
from batching.config import EngineConfig
from batching.errors import ModelLoadError
from batching.fit.estimate import STATES_EACH

# Shares of the memory that is free once the model is loaded: for running requests, and for the prefix cache.
_RUNNING_SHARE: Final = 0.25
_CACHE_SHARE: Final = 0.125
# A checkpoint belongs to a block, and there are not more of them where the pool takes what fits.
_MAX_CHECKPOINTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StateSize:
    """The number of recurrent states.

    num_bytes: of all of them together.
    note: for the start-up banner; empty if the model has no such state.
    """

    num_running: int
    num_checkpoints: int | None
    num_bytes: int = 0
    note: str = ""


def state_size(config: EngineConfig, bytes_per_state: int, *, has_state: bool) -> StateSize:
    """Return how many requests can run at once and how many states the prefix cache keeps.

    bytes_per_state: of one request.

    Raises:
        ModelLoadError: there is not enough memory for one request, or for what the operator has set.
    """
    if not has_state:
        return StateSize(config.max_num_seqs, None)
    free = free_memory()
    each = max(1, STATES_EACH * bytes_per_state)
    if each > free:
        raise ModelLoadError(
            f"the recurrent state of one request needs {-(-each // MIB)} MiB, and there is room "
            f"for {free // MIB} MiB: take a smaller model, or a smaller MLX_SERVER_MAX_MODEL_LEN"
        )
    num_running = max(1, min(config.max_num_seqs, int(_RUNNING_SHARE * free) // each))
    num_checkpoints = _num_checkpoints(config, bytes_per_state, free)
    num_bytes = num_running * each + num_checkpoints * bytes_per_state
    if num_bytes > free:
        raise ModelLoadError(
            f"MLX_SERVER_STATE_CACHE_MIB={config.state_cache_mib} does not fit: {free // MIB} MiB are "
            f"free, of which {num_running} running requests take {num_running * each // MIB} MiB"
        )
    note = (
        f"recurrent state {_size(bytes_per_state)} a request, {num_checkpoints} in the prefix cache"
    )
    if num_running < config.max_num_seqs:
        note += f"; {num_running} requests at once: no more states fit"
    return StateSize(num_running, num_checkpoints, num_bytes, note)


def _num_checkpoints(config: EngineConfig, bytes_per_state: int, free: int) -> int:
    if not config.enable_prefix_cache:
        return 0
    budget = config.state_cache_mib
    num_bytes = int(_CACHE_SHARE * free) if budget is None else budget * MIB
    most = config.num_blocks or config.max_blocks or _MAX_CHECKPOINTS
    return min(num_bytes // max(1, bytes_per_state), most)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB // 10 else f"{num_bytes} bytes"

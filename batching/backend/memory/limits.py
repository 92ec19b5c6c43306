"""The memory limits that MLX has on a GPU."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from batching.backend.devices import Gpu
from batching.backend.memory.device import MIB
from batching.errors import ModelLoadError

logger = logging.getLogger(__name__)


class MemoryControls(Protocol):
    """The part of `mlx.core` that sets limits, all of them in bytes; a fake where there is no GPU."""

    def set_cache_limit(self, limit: int) -> int: ...

    def set_memory_limit(self, limit: int) -> int: ...

    def set_wired_limit(self, limit: int) -> int: ...

    def get_active_memory(self) -> int: ...

    def device_info(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory settings of a GPU.

    cache_mib: MiB of freed buffers that MLX may keep for reuse.
    wired_mib: MiB that macOS must keep in place for the GPU; None is the weights and the KV pool, 0 is
        nothing.  It has no effect on CUDA, whose memory is never moved.
    """

    gpu: Gpu
    cache_mib: int
    wired_mib: int | None = None
    controls: MemoryControls = mx

    def prepare(self) -> None:
        """Set the memory limits, and check the wired limit, before a model is loaded.

        Raises:
            ModelLoadError: the wired limit exceeds what the system allows.
        """
        most = self._most_wired()
        if most is not None and (self.wired_mib or 0) * MIB > most:
            raise ModelLoadError(
                f"MLX_SERVER_WIRED_LIMIT_MIB={self.wired_mib} is more than the {most // MIB} MiB that macOS "
                f"lets a GPU wire: set at most that, or first sudo sysctl iogpu.wired_limit_mb={self.wired_mib}"
            )
        self.controls.set_cache_limit(self.cache_mib * MIB)
        if most is not None:
            # By default MLX queues work for the GPU until its arrays take half as much again.
            self.controls.set_memory_limit(most)

    def wire(self) -> int:
        """Set the wired limit, by default to the size of the weights and the pool; return it in bytes.

        If that does not fit, it is not wired, and a warning says what to change.
        """
        most = self._most_wired()
        if most is None or self.wired_mib == 0:
            return 0
        used = self.controls.get_active_memory()
        wanted = used if self.wired_mib is None else self.wired_mib * MIB
        if wanted > most:
            logger.warning(
                "weights and KV cache take %d MiB, and macOS lets a GPU wire %d MiB of them, so that it may move "
                "the rest: set fewer blocks (MLX_SERVER_NUM_BLOCKS), or "
                "sudo sysctl iogpu.wired_limit_mb=%d",
                *(-(-wanted // MIB), most // MIB, -(-wanted // MIB)),
            )
        limit = min(wanted, most)
        try:
            self.controls.set_wired_limit(limit)
        except (RuntimeError, ValueError) as error:
            logger.warning(
                "no memory is wired, MLX_SERVER_WIRED_LIMIT_MIB=0 asks for none: %s", error
            )
            return 0
        return limit

    def unwire(self) -> None:
        """Let the system move the memory of a model that is gone; other models keep theirs."""
        if self._most_wired() is not None and self.wired_mib != 0:
            with suppress(RuntimeError, ValueError):
                self.controls.set_wired_limit(self.controls.get_active_memory())

    def device_line(self) -> str:
        """Return the name of the GPU, and its memory for arrays."""
        info = self.controls.device_info()
        return f"{info.get('device_name', 'GPU')} ({self.gpu})"

    def limits_line(self, wired: int) -> str:
        """Return the limits for the start-up line; `wired` is in bytes."""
        line = f"MLX keeps at most {self.cache_mib} MiB of freed buffers"
        return f"{line}, wired limit {wired // MIB} MiB" if self.gpu is Gpu.METAL else line

    def _most_wired(self) -> int | None:
        """Return how many bytes the system lets a GPU wire; None if it wires nothing."""
        most = self.controls.device_info().get("max_recommended_working_set_size")
        return int(most) if self.gpu is Gpu.METAL and most is not None else None

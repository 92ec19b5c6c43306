"""A GPU that MLX computes on, with the kernels of this project for its pool, or without."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from batching.backend.adapters.linears import AdaptedLinears
from batching.backend.adapters.stacked import StackedLinearModules
from batching.backend.devices import Gpu
from batching.backend.hooks.changes import Changes
from batching.backend.hooks.flat_rows import flatten_rows
from batching.backend.hooks.rows import RowSelection
from batching.backend.memory.limits import GpuMemory
from batching.backend.numerics import NOTHING_SET, Numerics
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import CacheLayout
from batching.backend.paged.mlx_pool import device_cache
from batching.backend.platform import MakePool, Platform
from batching.backend.platforms.gpu.kernel_pool import kernel_cache, why_not
from batching.backend.platforms.gpu.kernels.sources import sources_digest
from batching.backend.platforms.gpu.pool_kernels import PoolKernels
from batching.backend.platforms.gpu.rotations import remember_rotations
from batching.backend.platforms.gpu.step_graphs import StepGraphs
from batching.backend.sampling.sampler import Sampler, draw_on_device
from batching.config import GpuKernelsMode
from batching.errors import ModelLoadError, UnsupportedKVDType

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GPUPlatform(Platform):
    """A GPU.

    memory: the limits that MLX has there.
    kernels: write and read the pool; None is the pool of MLX's operations.
    reason: why there are no kernels.
    mode: whether they are required, and whether the operator wants to know of a model without them.
    keeps_graphs: the graphs of decode steps are kept and used again.
    """

    gpu: Gpu
    memory: GpuMemory
    numerics: Numerics = NOTHING_SET
    kernels: PoolKernels | None = None
    reason: str = "switched off"
    mode: GpuKernelsMode = "auto"
    keeps_graphs: bool = True

    checks_long_context = True

    @property
    def weights_dtype(self) -> mx.Dtype | None:
        return self.numerics.dtype

    @property
    def kv_dtype(self) -> mx.Dtype | None:
        return self.numerics.kv_dtype

    @property
    def holds_int8(self) -> bool:
        return self.kernels is not None

    @property
    def compiles_kernels(self) -> bool:
        return self.kernels is not None

    def hook(self, model: nn.Module, changes: Changes) -> None:
        if self.gpu is Gpu.CUDA:
            flatten_rows(model, changes)

    @property
    def accelerated(self) -> Sequence[Platform]:
        if self.kernels is None:
            return ()
        without_graphs = replace(self, keeps_graphs=False)
        return (self, without_graphs) if self.keeps_graphs else (without_graphs,)

    def portable(self, reason: str) -> Self:
        return replace(self, kernels=None, reason=reason)

    def unsupported(self, layout: CacheLayout) -> str:
        return "" if self.kernels is None else why_not(self.kernels, layout)

    def hook_mode(self, model: nn.Module, changes: Changes) -> None:
        # Keys that are rounded to 8 bits are copies, which do not know what they were made from.
        if self.kernels is not None and not self.numerics.has_int8:
            remember_rotations(model, changes)

    def confirm(self, model_id: str, layout: CacheLayout) -> None:
        if self.kernels is None:
            check_required(self.mode, self.reason)
            if self.mode != "off":
                logger.warning("%s: the GPU kernels are off: %s", model_id, self.reason)
        elif not self.keeps_graphs:
            logger.warning(
                "%s: the graph of each decode step is built each time: kept ones are not right",
                model_id,
            )
        # Where the kernels are not right, layers that they would have kept so are as the model makes them.
        if self.numerics.has_int8 and layout.with_dtype(mx.int8) != layout:
            raise UnsupportedKVDType("int8", "GPU", f"off: {self.reason}")

    @property
    def make_pool(self) -> MakePool:
        if self.kernels is not None:
            return partial(kernel_cache, self.kernels)
        return partial(device_cache, views_decodes=self.gpu is not Gpu.CUDA)

    def linear_modules(
        self, modules: Mapping[str, nn.Module], num_adapters: int, changes: Changes
    ) -> AdaptedLinears:
        return StackedLinearModules(modules, num_adapters, changes)

    def sampler(self) -> Sampler:
        return Sampler(draw_on_device)

    def graphs(
        self, cache: PagedKVCache, selection: RowSelection, *, is_check: bool = False
    ) -> StepGraphs | None:
        if self.kernels is None or not self.keeps_graphs:
            return None
        return StepGraphs(cache, selection, is_check=is_check)

    @property
    def identity(self) -> Mapping[str, object]:
        return {
            "platform": self.gpu,
            "device": self.memory.device_line(),
            "kernels": None if self.kernels is None else sources_digest(),
        }

    def device_line(self, weights: str) -> str:
        return f"{self.memory.device_line()}, weights {weights}"

    def kernels_line(self, note: str) -> str:
        return f"of the KV cache: {f'off: {self.reason}' if self.kernels is None else self.kernels}"

    def wire(self) -> str:
        return self.memory.limits_line(self.memory.wire())

    def release(self) -> None:
        self.memory.unwire()


def check_required(mode: GpuKernelsMode, reason: str) -> None:
    """Check that the kernels of a GPU are not required where there are none.

    Raises:
        ModelLoadError: they are; it says why there are none.
    """
    if mode == "require":
        raise ModelLoadError(
            f"the GPU kernels are required, and {reason}: "
            "set MLX_SERVER_GPU_KERNELS=auto to start without them"
        )

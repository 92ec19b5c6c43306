"""Which kind of pool serves a model."""

import platform
from collections.abc import Callable
from functools import partial
from typing import Final

import mlx.core as mx

from batching.backend.cpu.host_cache import host_cache
from batching.backend.devices import Gpu
from batching.backend.gpu.kernel_pool import kernel_cache
from batching.backend.gpu.pool_kernels import ON_CPU, NoKernels, PoolKernels
from batching.backend.native.pools.cache import native_cache
from batching.backend.native_loader import Native
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import CacheLayout
from batching.backend.paged.mlx_pool import device_cache

# Where MLX's element-wise kernels are scalar; on ARM they use its vectors.
_SCALAR_MACHINES: Final = ("x86_64", "AMD64")


def is_on_host(layout: CacheLayout, gpu: Gpu | None = None) -> bool:
    """True if numpy computes what MLX would compute slowly."""
    is_float32 = all(shape.dtype == mx.float32 for shape in layout.shapes)
    on_cpu = gpu is None and mx.default_device() == mx.cpu
    return is_float32 and on_cpu and platform.machine() in _SCALAR_MACHINES


def kv_cache(
    layout: CacheLayout,
    num_blocks: int,
    block_size: int,
    native: Native | None = None,
    *,
    gpu: Gpu | None = None,
    kernels: PoolKernels | NoKernels = ON_CPU,
    num_window_blocks: int = 0,
    one_by_one: bool = False,
    rounds_inputs: bool = False,
) -> PagedKVCache:
    """Return an empty pool of the kind that is read fastest.

    gpu: what computes; None is the CPU.  kernels: those of its pool, which can keep the layout.
    num_window_blocks: of layers with a window; 0 is no blocks of their own.
    rounds_inputs: the kernels' attention may round to 16 bits.
    """
    kind: Callable[..., PagedKVCache] = partial(device_cache, views_decodes=gpu is not Gpu.CUDA)
    if is_on_host(layout, gpu):
        kind = host_cache
    if not isinstance(kernels, NoKernels):
        kind = partial(kernel_cache, kernels)
    if native is not None:
        kind = partial(native_cache, native, rounds_inputs=rounds_inputs)
    return kind(
        layout.layers,
        num_blocks,
        block_size,
        num_window_blocks=num_window_blocks,
        one_by_one=one_by_one,
    )

"""Chooses the kind of KV pool that serves a model fastest."""

from collections.abc import Callable
from functools import partial

from batching.backend.devices import Gpu
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import CacheLayout
from batching.backend.paged.mlx_pool import device_cache
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.pools.cache import native_cache
from batching.backend.platforms.gpu.kernel_pool import kernel_cache
from batching.backend.platforms.gpu.pool_kernels import ON_CPU, NoKernels, PoolKernels


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
    """Return an empty pool of the kind that is fastest here.

    num_blocks, block_size: of the pool, and tokens per block.
    native: the native CPU kernels; None if they are not used.
    gpu: the GPU that computes; None is the CPU.
    kernels: the kernels that write and read a GPU's pool; they support the layout.
    num_window_blocks: blocks of the pool of sliding-window layers; 0 lets them share the main pool.
    one_by_one: modules with a state, or with attention of their own, get one request at a time.
    rounds_inputs: the native attention may round its inputs to 16 bits.
    """
    kind: Callable[..., PagedKVCache] = partial(device_cache, views_decodes=gpu is not Gpu.CUDA)
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

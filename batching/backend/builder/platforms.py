"""Chooses the platform of a model, from the settings and what the machine has."""

import logging

from batching.backend import BLAS
from batching.backend.devices import Gpu, select_device
from batching.backend.memory.device import limit_memory
from batching.backend.memory.limits import GpuMemory
from batching.backend.numerics import Numerics
from batching.backend.platform import Platform
from batching.backend.platforms.cpu.native_loader import Native, load_native
from batching.backend.platforms.cpu.platform import CPUPlatform
from batching.backend.platforms.gpu.platform import GPUPlatform, check_required
from batching.backend.platforms.gpu.source_kernels import load_kernels
from batching.backend.platforms.mlx import MLXPlatform
from batching.backend.processor.blas import NoBlas
from batching.backend.weights_cache.cache import GIB, NO_CACHE, WeightsCache, default_folder
from batching.config import EngineConfig
from batching.errors import UnsupportedKVDType

logger = logging.getLogger(__name__)


def choose_platform(config: EngineConfig, *, is_divided: bool = False) -> Platform:
    """Make a device MLX's default device, and return the platform that computes on it.

    is_divided: other ranks have parts of the model, which the native kernels do not add up.

    Raises:
        ModelLoadError: something is required that is not here.
    """
    gpu = select_device(config.device)
    limit_memory(None if config.max_memory_gib is None else int(config.max_memory_gib * GIB))
    return _on_cpu(config, is_divided) if gpu is None else _on_gpu(config, gpu)


def _on_cpu(config: EngineConfig, is_divided: bool) -> Platform:
    check_required(config.gpu_kernels, "MLX computes on the CPU")
    if isinstance(BLAS, NoBlas) and BLAS.is_slow:
        logger.warning("the model will be very slow: %s", BLAS)
    numerics = Numerics.of(config)
    if is_divided:
        return MLXPlatform(numerics, "a part of a model runs without them")
    native = load_native(config.native, config.cpu_threads)
    if isinstance(native, Native):
        is_required = config.native == "require"
        return CPUPlatform(native, numerics, _weights_cache(config), is_required)
    return MLXPlatform(numerics, native.reason)


def _on_gpu(config: EngineConfig, gpu: Gpu) -> Platform:
    # It says so if they are required.
    load_native(config.native)
    memory = GpuMemory(gpu, config.mlx_cache_mib, config.wired_limit_mib)
    memory.prepare()
    kernels = None if config.gpu_kernels == "off" else load_kernels(gpu)
    platform = GPUPlatform(gpu, memory, Numerics.of(config), kernels, mode=config.gpu_kernels)
    if config.kv_cache_dtype == "int8" and not platform.holds_int8:
        raise UnsupportedKVDType("int8", "GPU", f"off: {platform.reason}")
    return platform


def _weights_cache(config: EngineConfig) -> WeightsCache:
    folder = config.weights_cache_dir or default_folder()
    if folder is None:
        logger.warning("packed weights are not kept: there is no home directory for them")
        return NO_CACHE
    return WeightsCache(folder, config.weights_cache_gib * GIB)

"""Models checked on a platform that a test names by its kernels."""

from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.devices import Gpu
from batching.backend.execution_mode import CheckResult
from batching.backend.hooks.changes import Changes
from batching.backend.memory.limits import GpuMemory
from batching.backend.numerics import Numerics
from batching.backend.platform import Platform
from batching.backend.platforms.cpu.layers.replace import (
    replace_modules as put_modules_on_kernels,
)
from batching.backend.platforms.cpu.model import use_kernels as put_on_kernels
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.platform import CPUPlatform
from batching.backend.platforms.gpu.platform import GPUPlatform
from batching.backend.platforms.gpu.pool_kernels import PoolKernels
from batching.backend.platforms.mlx import MLXPlatform
from batching.backend.self_check.check import check_model as check_on_platform
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.self_check.long_steps import MAX_TOKENS

_CACHE_MIB: Final = 1024


def platform_of(
    native: Native | None = None,
    kv_dtype: mx.Dtype | None = None,
    *,
    gpu: Gpu | None = None,
    kernels: PoolKernels | None = None,
) -> Platform:
    """Return the platform of the native kernels, of a GPU, or else of MLX alone; it rounds nothing."""
    numerics = Numerics(kv_dtype=kv_dtype, is_exact=True)
    if native is not None:
        return CPUPlatform(native, numerics)
    if gpu is not None:
        return GPUPlatform(gpu, GpuMemory(gpu, _CACHE_MIB), numerics, kernels)
    return MLXPlatform(numerics)


def check_model(
    model: nn.Module,
    vocab_size: int,
    native: Native | None = None,
    kv_dtype: mx.Dtype | None = None,
    known: CheckResult | None = None,
    *,
    gpu: Gpu | None = None,
    kernels: PoolKernels | None = None,
    max_model_len: int = MAX_TOKENS,
) -> CheckedModel:
    """Check a model that is never closed; with the native kernels it is on them already."""
    platform = platform_of(native, kv_dtype, gpu=gpu, kernels=kernels)
    return check_on_platform(
        model, vocab_size, platform, Changes(), known=known, max_model_len=max_model_len
    )


def gpu_of(checked: CheckedModel) -> GPUPlatform:
    """Return the form of a GPU on which a model was found to be right."""
    assert isinstance(checked.platform, GPUPlatform)
    return checked.platform


def on_kernels(checked: CheckedModel, kernels: PoolKernels | None) -> CheckedModel:
    """Return a model on a GPU's pool of other kernels, or of none."""
    return replace(checked, platform=replace(gpu_of(checked), kernels=kernels))


def why_none(checked: CheckedModel) -> str:
    """Return why a model on a GPU is served without kernels."""
    assert gpu_of(checked).kernels is None
    return gpu_of(checked).reason


def use_kernels(model: nn.Module, native: Native, **options: Any) -> nn.Module:
    """Put a model that is never closed on the native kernels."""
    return put_on_kernels(model, native, changes=Changes(), **options)


def replace_modules(model: nn.Module, native: Native, **options: Any) -> nn.Module:
    """Put the modules of a model that is never closed on the native kernels, one by one."""
    return put_modules_on_kernels(model, native, changes=Changes(), **options)

"""The number formats that an engine computes in, as its settings and the native kernels determine."""

from enum import Enum, auto
from typing import Final

import mlx.core as mx

from batching.backend.platforms.cpu.native_loader import Native, NoNative
from batching.config import EngineConfig

_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_KV_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "int8": mx.int8}


class FurtherRounding(Enum):
    """What activations are rounded to once the self-check has passed.

    BFLOAT16: and so are weights; a matrix unit of the processor multiplies both.
    SCALED: to 8 bits, scaled by channel, for weights of up to 4 bits.
    """

    BFLOAT16 = auto()
    SCALED = auto()


def weights_dtype(config: EngineConfig, native: Native | NoNative) -> mx.Dtype | None:
    """Return the type to which weights are converted; None keeps them as they are stored.

    On a CPU, MLX multiplies quantized and half-precision weights 40 to 100 times slower than float32
    through BLAS, so float32 is the default there without the native kernels.
    """
    if config.dtype == "auto":
        is_slow = mx.default_device() == mx.cpu and isinstance(native, NoNative)
        return mx.float32 if is_slow else None
    return _DTYPES[config.dtype]


def input_bits(config: EngineConfig, native: Native | NoNative) -> int:
    """Return to how many bits the kernels round activations before products; 32 is not at all."""
    if config.cpu_precision == "exact" or isinstance(native, NoNative):
        return 32
    return max(16, native.min_input_bits)


def further_rounding(config: EngineConfig, native: Native | NoNative) -> FurtherRounding | None:
    """Return how the kernels round further than to `input_bits`, or None."""
    if config.cpu_precision == "exact" or isinstance(native, NoNative):
        return None
    if native.supports_bfloat16:
        return FurtherRounding.BFLOAT16
    return FurtherRounding.SCALED if native.min_input_bits == 8 else None


def uses_bfloat16(config: EngineConfig, native: Native | NoNative) -> bool:
    """Return whether a matrix unit of the processor multiplies in bfloat16."""
    return further_rounding(config, native) is FurtherRounding.BFLOAT16


def kv_dtype(config: EngineConfig, native: Native | NoNative) -> mx.Dtype | None:
    """Return the type of keys and values; None is the type in which the model makes them.

    bfloat16 keys together with rounded activations lose less than a model in bfloat16 does, which is how
    models are published; hence the default with native kernels.
    """
    if config.kv_cache_dtype == "auto" and config.cpu_precision == "auto":
        return mx.bfloat16 if isinstance(native, Native) else None
    return _KV_DTYPES.get(config.kv_cache_dtype)

"""The number formats that an engine computes in, as its settings and the native kernels determine."""

from typing import Final

import mlx.core as mx

from batching.backend.native_loader import Native, NoNative
from batching.config import EngineConfig

_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_KV_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "int8": mx.int8}
# To how many bits each `cpu_precision` rounds the activations that are multiplied with quantized weights.
_INPUT_BITS: Final = {"exact": 32, "auto": 16, "fast": 16, "fastest": 8}
# The modes that multiply in bfloat16 if the processor has a matrix unit, and otherwise round to 8 bits if
# activations can be scaled by channel.
_ROUNDS_FURTHER: Final = ("auto", "fastest")


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
    if not isinstance(native, Native):
        return 32
    # What is multiplied in bfloat16 is packed in the same order.
    bits = 16 if uses_bfloat16(config, native) else _INPUT_BITS[config.cpu_precision]
    return max(bits, native.min_input_bits)


def uses_bfloat16(config: EngineConfig, native: Native | NoNative) -> bool:
    """Return whether a matrix unit of the processor multiplies in bfloat16."""
    can = isinstance(native, Native) and native.supports_bfloat16
    return can and config.cpu_precision in _ROUNDS_FURTHER


def scales_inputs(config: EngineConfig, native: Native | NoNative) -> bool:
    """Return whether activations are scaled by channel, so that 8 bits suffice."""
    can = isinstance(native, Native) and native.supports_scaled_inputs
    is_asked = config.cpu_precision in _ROUNDS_FURTHER
    return can and is_asked and not uses_bfloat16(config, native)


def kv_dtype(config: EngineConfig, native: Native | NoNative) -> mx.Dtype | None:
    """Return the type of keys and values; None is the type in which the model makes them.

    bfloat16 keys together with rounded activations lose less than a model in bfloat16 does, which is how
    models are published; hence the default with native kernels.
    """
    if config.kv_cache_dtype == "auto" and config.cpu_precision == "auto":
        return mx.bfloat16 if isinstance(native, Native) else None
    return _KV_DTYPES.get(config.kv_cache_dtype)

"""The number formats that a model is computed in, as far as the settings say."""

from dataclasses import dataclass
from typing import Final, Self

import mlx.core as mx

from batching.config import EngineConfig

# What is stored of keys, values and states is of this version of how they are computed.  A change that moves them by more than
# the last bits gets another number; tests/batching/backend/test_numerics_version.py notices.
NUMERICS_VERSION: Final = 2

_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_KV_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "int8": mx.int8}


# MLX cannot compare a type with None.
@dataclass(frozen=True, eq=False)
class Numerics:
    """The number formats that are set; a platform decides what is not.

    dtype: the type to which weights are converted; None is not set.
    kv_dtype: the type of keys and values; None is not set.
    is_exact: nothing is rounded further than the weights are as stored.
    """

    dtype: mx.Dtype | None = None
    kv_dtype: mx.Dtype | None = None
    is_exact: bool = False

    @property
    def has_int8(self) -> bool:
        """Whether keys and values are of 8 bits."""
        return self.kv_dtype is not None and self.kv_dtype == mx.int8

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        return cls(
            _DTYPES.get(config.dtype),
            _KV_DTYPES.get(config.kv_cache_dtype),
            is_exact=config.cpu_precision == "exact",
        )


NOTHING_SET: Final = Numerics()

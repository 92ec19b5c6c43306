"""MLX alone, on a CPU: no kernels of this project are needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from batching.backend import BLAS
from batching.backend.numerics import NOTHING_SET, Numerics
from batching.backend.paged.mlx_pool import device_cache
from batching.backend.platform import MakePool, Platform
from batching.errors import UnsupportedKVDType

# A copy of a block takes a CPU about as long as a token or two of a prompt.
MIN_COPIED_TOKENS: Final = 4


@dataclass(frozen=True)
class MLXPlatform(Platform):
    """MLX on a CPU.

    reason: why the native kernels are not used.

    Raises:
        UnsupportedKVDType: keys and values of 8 bits are set, which need kernels.
    """

    numerics: Numerics = NOTHING_SET
    reason: str = "switched off"

    min_copied_tokens = MIN_COPIED_TOKENS
    holds_int8 = False

    def __post_init__(self) -> None:
        if self.numerics.has_int8:
            raise UnsupportedKVDType("int8", "native", f"off: {self.reason}")

    @property
    def weights_dtype(self) -> mx.Dtype | None:
        """float32 unless it is set: MLX multiplies others 40 to 100 times slower than these through BLAS."""
        return self.numerics.dtype or mx.float32

    @property
    def kv_dtype(self) -> mx.Dtype | None:
        return self.numerics.kv_dtype

    @property
    def make_pool(self) -> MakePool:
        return device_cache

    @property
    def identity(self) -> Mapping[str, object]:
        return {"platform": "mlx", "blas": str(BLAS)}

    def device_line(self, weights: str) -> str:
        return f"cpu, weights {weights}, BLAS: {BLAS}"

    def kernels_line(self, note: str) -> str:
        return f"off: {self.reason}"

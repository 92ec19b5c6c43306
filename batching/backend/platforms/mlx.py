"""MLX alone, on a CPU: no kernels of this project are needed."""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from batching.backend import BLAS
from batching.backend.numerics import NOTHING_SET, Numerics
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import CacheLayout
from batching.backend.paged.mlx_pool import device_cache
from batching.backend.platform import Platform
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

    def cache(
        self,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        *,
        num_window_blocks: int = 0,
        one_by_one: bool = False,
    ) -> PagedKVCache:
        return device_cache(
            layout.layers,
            num_blocks,
            block_size,
            num_window_blocks=num_window_blocks,
            one_by_one=one_by_one,
        )

    def device_line(self, weights: str) -> str:
        return f"cpu, weights {weights}, BLAS: {BLAS}"

    def kernels_line(self, note: str) -> str:
        return f"off: {self.reason}"

"""The native kernels of a CPU: weights are packed for them, and their pool is read in place."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Self

import mlx.core as mx
import mlx.nn as nn

from batching.backend import BLAS
from batching.backend.encoders.encoder import PlainTrunk, Trunk
from batching.backend.hooks.changes import Changes
from batching.backend.loader import LoadedModel
from batching.backend.numerics import NOTHING_SET, Numerics
from batching.backend.platform import Instead, MakePool, Platform, PreparedModel
from batching.backend.platforms.cpu.encoders import native_trunk
from batching.backend.platforms.cpu.layers.replace import min_input_bits
from batching.backend.platforms.cpu.native_loader import INTERFACE_VERSION, Native
from batching.backend.platforms.cpu.packed_model import FurtherRounding, PackedModel
from batching.backend.platforms.cpu.pools.cache import native_cache
from batching.backend.platforms.cpu.sampling import native_sampler
from batching.backend.platforms.mlx import MIN_COPIED_TOKENS, MLXPlatform
from batching.backend.sampling.sampler import Sampler
from batching.backend.weights.storage import dtype_name
from batching.backend.weights_cache.cache import NO_CACHE, WeightsCache
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.scheduling.stall_budget import MIN_CHUNK

# A matrix unit multiplies 32 rows at a time, and 32 tokens and the streams' own rows would take it as long as 64 rows.
_MIN_CHUNK_OF_UNIT: Final = 48
_FLOAT_BITS: Final = 32


@dataclass(frozen=True)
class CPUPlatform(Platform):
    """The native kernels of a CPU.

    weights_cache: keeps packed weights for the next start.
    is_required: a model that does not run on the kernels is not served without them.
    rounds_attention: attention may round its inputs to 16 bits.
    """

    native: Native
    numerics: Numerics = NOTHING_SET
    weights_cache: WeightsCache = NO_CACHE
    is_required: bool = False
    rounds_attention: bool = False

    packs_weights = True
    holds_int8 = True
    min_copied_tokens = MIN_COPIED_TOKENS

    @property
    def weights_dtype(self) -> mx.Dtype | None:
        return self.numerics.dtype

    @property
    def kv_dtype(self) -> mx.Dtype | None:
        """bfloat16 unless it is set, together with rounded activations.

        That loses less than a model in bfloat16 does, which is how models are published.
        """
        return self.numerics.kv_dtype or (None if self.numerics.is_exact else mx.bfloat16)

    @property
    def input_bits(self) -> int:
        """To how many bits activations are rounded before products; 32 is not at all."""
        return _FLOAT_BITS if self.numerics.is_exact else max(16, self.native.min_input_bits)

    @property
    def further_rounding(self) -> FurtherRounding | None:
        """How activations are rounded further than to `input_bits`."""
        if self.numerics.is_exact:
            return None
        if self.native.supports_bfloat16:
            return FurtherRounding.BFLOAT16
        return FurtherRounding.SCALED if self.native.min_input_bits == 8 else None

    @property
    def min_chunk(self) -> int:
        has_unit = self.further_rounding is FurtherRounding.BFLOAT16
        return _MIN_CHUNK_OF_UNIT if has_unit else MIN_CHUNK

    def prepare(
        self,
        loaded: LoadedModel,
        model_id: str,
        changes: Changes,
        slices: LoadSlices = ONE_SLICE,
    ) -> PreparedModel | Instead:
        entry = self.weights_cache.entry(
            Path(loaded.source),
            model_id,
            isa=self.native.isa,
            input_bits=self.input_bits,
            dtype=None if self.weights_dtype is None else dtype_name(self.weights_dtype),
        )
        if_not_invariant = None if self.numerics.is_exact else self._exactly(model_id)
        packed = PackedModel(
            loaded,
            self.native,
            entry,
            input_bits=self.input_bits,
            further_rounding=self.further_rounding,
            kv_dtype=self.kv_dtype,
            if_not_invariant=if_not_invariant,
        )
        if packed.pack(changes, slices):
            return packed
        # The damaged file is gone now, if it can be deleted.
        return Instead(replace(self, weights_cache=NO_CACHE))

    def _exactly(self, model_id: str) -> Instead:
        """Return what becomes of a model whose rows depend on each other: rounding would amplify that."""
        return Instead(
            replace(self, numerics=replace(self.numerics, is_exact=True)),
            f"{model_id} is computed as with MLX_SERVER_CPU_PRECISION=exact: its attention is its own code, "
            "whose last bits depend on how a prompt is cut and on who else is in a step",
        )

    def fallback(self, reason: str) -> Instead | None:
        if self.is_required:
            return None
        off = "the model does not run on them"
        if self.numerics.has_int8:
            off = f"{off} ({reason})"
        return Instead(MLXPlatform(self.numerics, off), f"without the native kernels: {reason}")

    def serving(self, model: nn.Module) -> Self:
        return replace(self, rounds_attention=min_input_bits(model) < _FLOAT_BITS)

    @property
    def unrounded(self) -> Self:
        return replace(self, rounds_attention=False)

    @property
    def make_pool(self) -> MakePool:
        return partial(native_cache, self.native, rounds_inputs=self.rounds_attention)

    def sampler(self) -> Sampler:
        return native_sampler(self.native.module)

    def encoder_trunk(self, trunk: PlainTrunk, max_tokens: int, max_texts: int) -> Trunk:
        return native_trunk(self.native, trunk, max_tokens, max_texts)

    @property
    def identity(self) -> Mapping[str, object]:
        return {
            "platform": "cpu",
            "interface": INTERFACE_VERSION,
            "isa": self.native.isa,
            "input_bits": self.input_bits,
            "further_rounding": self.further_rounding and self.further_rounding.name,
            "rounds_attention": self.rounds_attention,
        }

    def device_line(self, weights: str) -> str:
        return f"cpu, weights {weights}, BLAS: {BLAS}"

    def kernels_line(self, note: str) -> str:
        if self.numerics.is_exact:
            return str(self.native)
        if self.further_rounding is FurtherRounding.BFLOAT16:
            return f"{self.native}; auto: weights and activations are multiplied in bfloat16"
        if self.input_bits == _FLOAT_BITS:
            note = "auto: this processor multiplies no integers, activations are not rounded"
            return f"{self.native}; {note}"
        rounded = f"quantized weights are multiplied with activations of {self.input_bits} bits"
        return ", ".join(filter(None, [f"{self.native}; auto: {rounded}", note]))

    def release(self) -> None:
        self.native.module.release_freed()

"""The recurrent half of a hybrid model's block as one operation.

As in `halves.py`, what it is made of is guessed by names, and `check_states.py` makes sure of it.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.host_array import host_array
from batching.backend.platforms.cpu.fused.mixers import describe
from batching.backend.platforms.cpu.fused.parts import (
    AS_CACHED,
    NOTHING,
    TOLERANCE,
    Around,
    OfRows,
    UnknownPart,
    floats_of,
    norm_of,
)
from batching.backend.platforms.cpu.layers.linear import Linear
from batching.backend.platforms.cpu.layers.recurrent import Conv1d
from batching.backend.platforms.cpu.pools.states import NativeStates


class RecurrentHalf:
    """A mixer on states that the kernels keep."""

    def __init__(self, kernels: Any, module: nn.Module, around: Around = NOTHING) -> None:
        mixer = describe(module)
        layers = [_layer(kernels, linear) for linear in mixer.layers]
        # The number of the mixer's arrays in mlx-lm's cache.
        self.num_arrays = mixer.num_arrays
        self.size = layers[0][0].shape[1]
        bits = [linear.product.input_bits for linear in mixer.layers if type(linear) is Linear]
        self.tolerance = TOLERANCE[min(bits, default=32)]
        self._kernels = kernels
        norms = [norm_of(each, self.size) for each in (around.norm, around.output_norm)]
        try:
            self._mixer = kernels.mixer(
                layers,
                [norms[0], (*mixer.head_norm, False, []), norms[1]],
                **_convolution(mixer.convolution, mixer.channels),
                **mixer.options,
                residual=around.residual,
            )
        except (IndexError, TypeError, ValueError) as error:
            raise UnknownPart(f"the parts of {type(module).__name__} do not fit") from error

    def takes(self, x: mx.array | None, cache: Any) -> bool:
        return isinstance(cache, NativeStates) and x is not None and x.ndim == 3 and x.shape[1] == 1

    def __call__(
        self, x: mx.array, mask: Any, cache: NativeStates, rows: OfRows = AS_CACHED
    ) -> mx.array:
        def run(pool: object, step: object) -> mx.array:
            mixed: mx.array = self._kernels.run_mixer(x, self._mixer, pool, step)
            return mixed

        return cache.run(self._mixer.pool, run)


def _layer(kernels: Any, layer: nn.Module) -> tuple[Any, list[float]]:
    if type(layer) is nn.Linear:
        # Too thin to be replaced.
        return kernels.pack(layer.weight), floats_of(layer.get("bias"))
    if type(layer) is not Linear:
        raise UnknownPart("a layer is not linear")
    return layer.product.packed[layer.index], floats_of(layer.product.biases[layer.index])


def _convolution(convolution: nn.Module, channels: list[int] | None) -> dict[str, list[float]]:
    """Return taps and biases; channels: their order in a state, if it is not that of the outputs."""
    if type(convolution) is not Conv1d:
        raise UnknownPart("the convolution is of another kind")
    order = slice(None) if channels is None else channels
    taps = host_array(convolution.weight[..., 0].T.astype(mx.float32))[:, order]
    bias = np.array(floats_of(convolution.get("bias")))
    return {"taps": taps.ravel().tolist(), "tap_bias": bias[order].tolist() if bias.size else []}

"""From what is pooled of a request to its vector: dense layers, a cut, the length 1."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batching.errors import ModelLoadError
from batching.pooling import PoolingParams

Floats = npt.NDArray[np.float32]

# By the last part of torch's name.
ACTIVATIONS: Final[Mapping[str, Callable[[Floats], Floats]]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
}


@dataclass(frozen=True)
class DenseLayer:
    """weight: `[out_size, in_size]`.  activation: one of ACTIVATIONS."""

    weight: Floats
    bias: Floats | None = None
    activation: str = "Identity"

    def __call__(self, x: Floats) -> Floats:
        # One vector at a time, so that its bits depend on no other.
        product = self.weight @ x
        return ACTIVATIONS[self.activation](product if self.bias is None else product + self.bias)


@dataclass(frozen=True)
class PoolingHead:
    dense: tuple[DenseLayer, ...] = ()

    def size(self, hidden_size: int) -> int:
        """Return how many numbers a vector has.

        Raises:
            ModelLoadError: the layers do not fit.
        """
        for layer in self.dense:
            if layer.weight.shape[1] != hidden_size:
                raise ModelLoadError(
                    f"a dense layer takes {layer.weight.shape[1]} numbers, and gets {hidden_size}"
                )
            hidden_size = layer.weight.shape[0]
        return hidden_size

    def vector(self, pooled: npt.NDArray[Any], params: PoolingParams) -> Floats:
        x: Floats = pooled.astype(np.float32)
        for layer in self.dense:
            x = layer(x)
        x = x[: params.dimensions]
        if params.normalize:
            length = np.sqrt(np.square(x, dtype=np.float64).sum())
            x = (x / max(length, 1e-12)).astype(np.float32)
        return x


NO_HEAD: Final = PoolingHead()

"""What a model keeps of a request, layer by layer, as one plain pass over it has shown."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import mlx.core as mx

# A float32 for each token and head of keys, and of values, that are kept in 8 bits.
_SCALE_BYTES: Final = 4


class LayerShape(NamedTuple):
    """Keys and values: what one layer keeps for a token.

    dtype: int8 is integers with scales, which the native kernels keep, and those of a GPU.
    window: the layer attends to that many last positions; None is all of them.
    is_chunked: it attends to those of them that lie in the row's own chunk of `window` positions.
    is_gathered: the model's own code reads them, and not the attention function that is hooked.
    is_shared: other layers read them, too.
    latent_dim: they are one latent of that size and one rotated key a token, kept side by side as a
        key; 0 is none.
    soft_cap: a score becomes `soft_cap * tanh(score / soft_cap)`; 0 is none.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None
    is_gathered: bool = False
    is_shared: bool = False
    latent_dim: int = 0
    soft_cap: float = 0.0
    is_chunked: bool = False

    @property
    def is_latent(self) -> bool:
        return self.latent_dim > 0

    @property
    def is_windowed(self) -> bool:
        """True if the pool attends within a window, so that what has left it need not stay."""
        return self.window is not None and not self.is_gathered

    @property
    def bytes_per_token(self) -> int:
        scales = 2 * _SCALE_BYTES if self.dtype == mx.int8 else 0
        return self.num_heads * ((self.key_dim + self.value_dim) * self.dtype.size + scales)

    def with_dtype(self, dtype: mx.Dtype) -> "LayerShape":
        """Return the same in another type, but what is gathered: not in integers."""
        is_plain = not (self.is_gathered or self.is_latent)
        return self._replace(dtype=dtype) if is_plain or dtype != mx.int8 else self


class StateShape(NamedTuple):
    """A recurrent state: arrays of constant size, whatever the number of tokens.

    num_bytes: of one request.
    """

    num_arrays: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class OwnShape:
    """A cache object of the model's own, of a kind that is not known; each request has one.

    empty: what a request begins with.
    num_bytes: of a request with no tokens, and `bytes_per_token` for each of them.
    """

    empty: Any
    num_bytes: int
    bytes_per_token: int


@dataclass(frozen=True)
class Several:
    """A layer that keeps more than one of them; mlx-lm's CacheList."""

    parts: tuple["LayerLayout", ...]


# None: the layer keeps nothing.
LayerLayout = LayerShape | StateShape | OwnShape | Several | None


@dataclass(frozen=True)
class CacheLayout:
    """All layers of a model."""

    layers: tuple[LayerLayout, ...]

    @property
    def shapes(self) -> list[LayerShape]:
        return [leaf for leaf in leaves(self.layers) if isinstance(leaf, LayerShape)]

    @property
    def bytes_per_token(self) -> int:
        return sum(shape.bytes_per_token for shape in self.shapes)

    @property
    def window(self) -> int | None:
        """The largest window of layers that can have blocks of their own; None if there are none."""
        return max((shape.window or 0 for shape in self.shapes if shape.is_windowed), default=None)

    @property
    def window_bytes_per_token(self) -> int:
        """The part of these layers."""
        return sum(shape.bytes_per_token for shape in self.shapes if shape.is_windowed)

    @property
    def has_state(self) -> bool:
        return any(not isinstance(leaf, LayerShape) for leaf in leaves(self.layers))

    @property
    def has_own(self) -> bool:
        return any(isinstance(leaf, OwnShape) for leaf in leaves(self.layers))

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one request's state in all layers, after so many tokens."""
        states = [leaf for leaf in leaves(self.layers) if not isinstance(leaf, LayerShape)]
        growing = sum(leaf.bytes_per_token for leaf in states if isinstance(leaf, OwnShape))
        return sum(leaf.num_bytes for leaf in states) + num_tokens * growing

    def with_dtype(self, dtype: mx.Dtype) -> "CacheLayout":
        """Return a layout that keeps keys and values in another type; states stay as they are."""

        def changed(layer: LayerLayout) -> LayerLayout:
            if isinstance(layer, Several):
                return Several(tuple(map(changed, layer.parts)))
            return layer.with_dtype(dtype) if isinstance(layer, LayerShape) else layer

        return CacheLayout(tuple(map(changed, self.layers)))


def leaves(layers: Iterable[LayerLayout]) -> Iterator[LayerShape | StateShape | OwnShape]:
    for layer in layers:
        if isinstance(layer, Several):
            yield from leaves(layer.parts)
        elif layer is not None:
            yield layer

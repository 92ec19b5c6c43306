"""The arrays that each layer of a model keeps of a request, as found out by one forward pass at load."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import mlx.core as mx

# A float32 for each token and head of keys, and of values, that are kept in 8 bits.
_SCALE_BYTES: Final = 4


class LayerShape(NamedTuple):
    """The keys and values that one layer keeps for each token.

    num_heads, key_dim, value_dim: key-value heads, and the sizes of one head's key and value.
    dtype: int8 is 8-bit integers with scales, which only the native kernels and those of a GPU support.
    window: the layer attends to this many last positions; None is all of them.
    is_chunked: of these, only to the positions in the row's own chunk of `window` positions.
    is_gathered: the model's own code reads keys and values, instead of the attention function that is
        hooked.
    is_shared: other layers read them as well.
    latent_dim: the layer keeps one latent of this size and one rotated key per token, side by side as a
        key (latent attention); 0 for other layers.
    soft_cap: a score becomes `soft_cap * tanh(score / soft_cap)`; 0 is no cap.
    sees_ahead: tokens of a span see each other, and not only those before them.
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
    sees_ahead: bool = False

    @property
    def is_latent(self) -> bool:
        return self.latent_dim > 0

    @property
    def is_windowed(self) -> bool:
        """True if blocks that have left the window can be given up."""
        return self.window is not None and not self.is_gathered

    @property
    def bytes_per_token(self) -> int:
        scales = 2 * _SCALE_BYTES if self.dtype == mx.int8 else 0
        return self.num_heads * ((self.key_dim + self.value_dim) * self.dtype.size + scales)

    def with_dtype(self, dtype: mx.Dtype) -> "LayerShape":
        """Return the shape with another type; layers that cannot be int8 stay as they are."""
        is_plain = not (self.is_gathered or self.is_latent)
        return self._replace(dtype=dtype) if is_plain or dtype != mx.int8 else self


class StateShape(NamedTuple):
    """A recurrent state: arrays whose size does not depend on the number of tokens.

    num_bytes: of one request.
    """

    num_arrays: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class OwnShape:
    """A cache object of a kind that is not known; each request gets one of its own.

    empty: the object with which a request starts.
    num_bytes: of a request without tokens.
    bytes_per_token: for each token, in addition.
    """

    empty: Any
    num_bytes: int
    bytes_per_token: int


@dataclass(frozen=True)
class Several:
    """A layer that keeps several of these, as with mlx-lm's CacheList."""

    parts: tuple["LayerLayout", ...]


# None: the layer keeps nothing.
LayerLayout = LayerShape | StateShape | OwnShape | Several | None


@dataclass(frozen=True)
class CacheLayout:
    """The layouts of all layers of a model."""

    layers: tuple[LayerLayout, ...]

    @property
    def shapes(self) -> list[LayerShape]:
        return [leaf for leaf in leaves(self.layers) if isinstance(leaf, LayerShape)]

    @property
    def dtypes(self) -> list[mx.Dtype]:
        """The types of keys and values, that of the first layer first."""
        return list(dict.fromkeys(shape.dtype for shape in self.shapes))

    @property
    def bytes_per_token(self) -> int:
        return sum(shape.bytes_per_token for shape in self.shapes)

    @property
    def window(self) -> int | None:
        """The largest window of layers that can have a pool of their own; None if there are none."""
        return max((shape.window or 0 for shape in self.shapes if shape.is_windowed), default=None)

    @property
    def window_bytes_per_token(self) -> int:
        """The bytes per token of the layers that can have a pool of their own."""
        return sum(shape.bytes_per_token for shape in self.shapes if shape.is_windowed)

    @property
    def has_state(self) -> bool:
        return any(not isinstance(leaf, LayerShape) for leaf in leaves(self.layers))

    @property
    def has_own(self) -> bool:
        return any(isinstance(leaf, OwnShape) for leaf in leaves(self.layers))

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one request's states in all layers after `num_tokens` tokens."""
        states = [leaf for leaf in leaves(self.layers) if not isinstance(leaf, LayerShape)]
        growing = sum(leaf.bytes_per_token for leaf in states if isinstance(leaf, OwnShape))
        return sum(leaf.num_bytes for leaf in states) + num_tokens * growing

    def with_dtype(self, dtype: mx.Dtype) -> "CacheLayout":
        """Return the layout with keys and values in another type; states stay as they are."""
        return self._changed(lambda shape: shape.with_dtype(dtype))

    def seeing_ahead(self, *, only_windowed: bool) -> "CacheLayout":
        """Return the layout with layers that see ahead: all, or those that attend to a window."""
        return self._changed(
            lambda shape: shape._replace(sees_ahead=shape.window is not None or not only_windowed)
        )

    def _changed(self, change: Callable[[LayerShape], LayerShape]) -> "CacheLayout":
        def changed(layer: LayerLayout) -> LayerLayout:
            if isinstance(layer, Several):
                return Several(tuple(map(changed, layer.parts)))
            return change(layer) if isinstance(layer, LayerShape) else layer

        return CacheLayout(tuple(map(changed, self.layers)))


def leaves(layers: Iterable[LayerLayout]) -> Iterator[LayerShape | StateShape | OwnShape]:
    for layer in layers:
        if isinstance(layer, Several):
            yield from leaves(layer.parts)
        elif layer is not None:
            yield layer

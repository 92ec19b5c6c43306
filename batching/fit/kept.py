"""What a model keeps of each request: keys and values for each token, and states."""

from dataclasses import dataclass
from typing import Final, NamedTuple

# A float32 for each token and head of keys, and of values, that are kept in 8 bits.
_SCALE_BYTES: Final = 4
# Of a number in a recurrent state.  Some are kept in 16 bits: this is the most.
_STATE_BYTES: Final = 4


class KeptLayer(NamedTuple):
    """The keys and values that a layer keeps for each token.

    window: the layer sees so many of the last tokens; None is all of them.
    is_gathered: the model's own code reads them.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    is_gathered: bool = False

    @property
    def may_be_8_bits(self) -> bool:
        """Whether they can be kept in 8 bits: latents, which have no values, and what is gathered cannot."""
        return self.value_dim > 0 and not self.is_gathered

    def bytes_per_token(self, kv_bytes: int, full_bytes: int) -> int:
        """Return the bytes of a token.

        kv_bytes: of a number; 1 is 8 bits with scales.
        full_bytes: of a number in layers that cannot be kept in 8 bits.
        """
        if kv_bytes > 1:
            return self.num_heads * (self.key_dim + self.value_dim) * kv_bytes
        if not self.may_be_8_bits:
            return self.num_heads * (self.key_dim + self.value_dim) * full_bytes
        return self.num_heads * (self.key_dim + self.value_dim + 2 * _SCALE_BYTES)


@dataclass(frozen=True, slots=True)
class Kept:
    """What all layers keep.

    state_numbers: numbers in the recurrent states of one request.
    """

    layers: tuple[KeptLayer, ...]
    state_numbers: int = 0

    @property
    def state_bytes(self) -> int:
        return self.state_numbers * _STATE_BYTES

    @property
    def is_gathered(self) -> bool:
        return any(layer.is_gathered for layer in self.layers)

    @property
    def window(self) -> int | None:
        """The largest window; None if there are none."""
        return max((layer.window or 0 for layer in self.layers), default=0) or None

    def bytes_per_token(self, kv_bytes: int, full_bytes: int = 2) -> int:
        return sum(layer.bytes_per_token(kv_bytes, full_bytes) for layer in self.layers)

    def window_bytes_per_token(self, kv_bytes: int, full_bytes: int = 2) -> int:
        """Return the part of layers with a window."""
        windowed = Kept(tuple(layer for layer in self.layers if layer.window))
        return windowed.bytes_per_token(kv_bytes, full_bytes)

"""Random numbers of one position of one request."""

from typing import Final

_MASK_64: Final = (1 << 64) - 1

# Makes a number of its own from the seed of a position.
_XTC: Final = 0x5851F42D4C957F2D


def draw_seed(seed: int, position: int) -> int:
    """Return the 64-bit seed with which one position of one request is sampled.

    splitmix64 (Steele, Lea, Flood 2014) over seed and position.  No state: neighbours,
    preemption and batching cannot change a sampled token.
    """
    return _splitmix(_splitmix(seed & _MASK_64) ^ position)


def applies_xtc(probability: float, seed: int) -> bool:
    """Return whether top choices are left out at the position with this seed, with this probability."""
    return probability > 0 and _splitmix(seed ^ _XTC) < probability * 2.0**64


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)

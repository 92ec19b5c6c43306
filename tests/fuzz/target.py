"""What a target of the fuzzer is."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Final, TypeVar
from zlib import crc32

# Of an input, up to so many bytes.
Mutate = Callable[[bytes, Random, int], bytes]
Text = TypeVar("Text", str, bytes)

_MAX_CUTS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function that raises on a bug alone.

    mutate: makes an input of another.
    max_bytes: of an input.
    cpu_seconds: of a core, for one input; the kernel rounds up.
    memory_bytes: of addresses, beyond what the process has before the first input.
    """

    run: Callable[[bytes], None]
    mutate: Mutate
    max_bytes: int = 1 << 16
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30


def pieces_of(text: Text) -> list[Text]:
    """Cut a text at places that depend on it alone, so that a finding can be replayed; none is empty."""
    encoded = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    rng = Random(crc32(encoded))
    places = {rng.randrange(len(text) + 1) for _ in range(rng.randint(0, _MAX_CUTS))}
    stops = sorted(places | {0, len(text)})
    return [text[start:stop] for start, stop in pairwise(stops)]


class Unavailable(Exception):
    """A target needs a program that this machine has not; raised while it is imported."""

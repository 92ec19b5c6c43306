"""A LoRA adapter as requests and plans name it, and the layers of a model that can have one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

NO_SLOT: Final = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter (Hu et al. 2021), as plain values; two with the same contents are equal.

    name: what clients call it.
    path: its folder on this machine.
    digest: SHA-256 of its weights and of all that says how they are used, in hexadecimal.
    rank: the largest of its layers.
    """

    name: str = field(compare=False)
    path: str = field(compare=False)
    digest: str
    rank: int = field(compare=False, default=1)

    def __str__(self) -> str:
        return self.name


class AdaptableLayer(NamedTuple):
    """A linear layer, by its sizes."""

    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class AdaptableLayers:
    """The layers of a loaded model to which adapters can add something, by their paths in it.

    refused: why not, for other layers that adapters are made for.
    max_rank: the largest rank that is served.
    takes_peft: whether weights are those that PEFT trains beside; mlx-lm multiplies some.
    """

    layers: Mapping[str, AdaptableLayer]
    refused: Mapping[str, str]
    max_rank: int
    takes_peft: bool = True


@dataclass(frozen=True, slots=True)
class NoAdapters:
    """A model that takes no adapters; `reason` says why, and follows its name in a sentence."""

    reason: str


NO_ADAPTERS: Final = NoAdapters("is served without adapters")

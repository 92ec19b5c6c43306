"""What a module of a model is called with."""

import inspect
from typing import Any, Final, NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn

from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.platforms.cpu.fused.parts import OfRows

_COMPARED: Final = (bool, int, float, str, SlidingWindow)


class OfRowsNames(NamedTuple):
    """The parameters of a module for what `OfRows` has; None are not there."""

    factors: str | None
    positions: str | None

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        parameters = inspect.signature(type(module).__call__).parameters
        # One whose default is None is made by the module, or of other layers.
        offset = parameters.get("offset")
        has_offset = offset is not None and offset.default is not None
        return cls(
            "attn_scale" if "attn_scale" in parameters else None, "offset" if has_offset else None
        )


class Arguments(NamedTuple):
    """is_known: there is nothing else that could matter."""

    x: mx.array | None
    mask: Any
    cache: Any
    rows: OfRows
    is_known: bool


class More(NamedTuple):
    """What a module is called with beside x."""

    given: tuple[Any, ...]
    named: dict[str, Any]

    def is_same(self, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether a call with x and more has the same beside x; an array is the same one only."""
        return (
            len(given) == len(self.given) + 1
            and named.keys() == self.named.keys()
            and all(map(_is_same, given[1:], self.given))
            and all(_is_same(value, self.named[key]) for key, value in named.items())
        )


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (
        type(value) is type(other) and isinstance(value, _COMPARED) and bool(value == other)
    )


class Parameters:
    """Finds, in what a module is called with, what all modules of its kind are given."""

    def __init__(self, module: nn.Module) -> None:
        self._names = list(inspect.signature(type(module).__call__).parameters)[1:]
        self._of_rows = OfRowsNames.of(module)

    @property
    def takes_rows(self) -> bool:
        """Whether a module takes what `OfRows` has."""
        return any(self._of_rows)

    def arguments(self, given: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        more = {**dict(zip(self._names, given, strict=False)), **named}
        x, mask, cache = (more.pop(name, None) for name in (self._names[0], "mask", "cache"))
        rows = OfRows(*(more.pop(name, None) if name else None for name in self._of_rows))
        is_known = len(given) <= len(self._names) and all(v is None for v in more.values())
        # What the module would make by itself is not known.
        is_known &= all(
            isinstance(value, mx.array) and value.size == len(x) if name else True
            for name, value in zip(self._of_rows, rows, strict=True)
        )
        return Arguments(x, mask, cache, rows, is_known)

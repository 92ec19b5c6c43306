"""The arguments with which a module of a model is called."""

import inspect
from typing import Any, NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn

from batching.backend.platforms.cpu.fused.parts import AS_CACHED, OfRows


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


class Parameters:
    """Finds, in what a module is called with, what all modules of its kind are given."""

    def __init__(self, module: nn.Module) -> None:
        self._names = list(inspect.signature(type(module).__call__).parameters)[1:]
        self._of_rows = OfRowsNames.of(module)
        self._usual = {*self._names[:1], "mask", "cache"} if self._of_rows == (None, None) else None

    def arguments(self, given: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        more = {**dict(zip(self._names, given, strict=False)), **named}
        if more.keys() == self._usual and len(given) <= len(self._names):
            # The steps of most models; the rest takes three times as long.
            return Arguments(more[self._names[0]], more["mask"], more["cache"], AS_CACHED, True)
        x, mask, cache = (more.pop(name, None) for name in (self._names[0], "mask", "cache"))
        rows = OfRows(*(more.pop(name, None) if name else None for name in self._of_rows))
        is_known = len(given) <= len(self._names) and all(v is None for v in more.values())
        # Values that the module would make by itself are not known.
        is_known &= all(
            isinstance(value, mx.array) and value.size == len(x) if name else True
            for name, value in zip(self._of_rows, rows, strict=True)
        )
        return Arguments(x, mask, cache, rows, is_known)

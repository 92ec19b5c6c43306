"""The layers of a model, and a forward pass that can stop between two of them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from batching.backend.hooks.changes import Changes, suspended
from batching.engine.load_slices import LoadSlices, OneSlice

_LAYER: Final = re.compile(r"(^|\.)layers\.\d+$")


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers by their paths, the first one first; none of them is inside of another one."""
    found: dict[str, nn.Module] = {}
    for path, module in sorted(model.named_modules(), key=lambda item: (len(item[0]), item[0])):
        is_inner = any(path.startswith(f"{layer}.") for layer in found)
        if _LAYER.search(path) and module.children() and not is_inner:
            found[path] = module
    return found


@contextmanager
def in_slices(model: nn.Module, slices: LoadSlices) -> Iterator[None]:
    """Within the block, compute each layer of a model when it is called, and then end a slice of the load.

    The results are those of a pass that is computed at once.  Nothing else may change the layers meanwhile.
    """
    changes = Changes()
    if not isinstance(slices, OneSlice):
        for layer in layers_of(model).values():
            changes.override_call(layer, _call_of(type(layer), slices))
    try:
        yield
    finally:
        changes.undo()


def _call_of(plain: type[nn.Module], slices: LoadSlices) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outputs = plain.__call__(self, *args, **kwargs)
        mx.eval(output_arrays(outputs))
        with suspended():
            slices.pause()
        return outputs

    return call


def output_arrays(outputs: Any) -> list[mx.array]:
    """Return the arrays in what a module returns."""
    arrays: dict[str, Any] = {}
    tree_flatten([outputs], destination=arrays)
    return [each for each in arrays.values() if isinstance(each, mx.array)]

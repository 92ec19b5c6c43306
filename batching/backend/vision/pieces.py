"""The work of a tower in pieces: it can stop behind each of its layers, and go on in a later step.

MLX computes nothing while the code of a tower runs; what its layers return is evaluated afterwards, one by one.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.changes import Changes, original, python_modules, running
from batching.backend.hooks.layers import output_arrays
from batching.backend.vision.mlx_vlm_models import PACKAGE

_LISTED: Final = re.compile(r"\.\d+$")


class LayerOutput(NamedTuple):
    """What a layer returns, and what modules beside the layers make of it, which the image needs in the end."""

    output: Sequence[mx.array]
    beside: list[mx.array]


class TowerLayers:
    """The layers of a tower: the longest list of modules; those of other lists are beside them (deepstack)."""

    def __init__(self, model: nn.Module, changes: Changes) -> None:
        """`model` has nothing but its tower and what is around it."""
        self._model = model
        self._outputs: list[LayerOutput] | None = None
        lists = _module_lists(model)
        layers = max(lists, key=len, default=[])
        self._num_layers = len(layers)
        for modules in lists:
            for module in modules:
                call = self._call_of(type(module), is_layer=modules is layers)
                changes.override_call(module, call)
        for owner in python_modules(model):
            if owner.__name__.startswith(f"{PACKAGE}.") and original(owner, "mx") is mx:
                changes.rebind_within(model, owner, "mx", eval=_not_now, async_eval=_not_now)

    def __len__(self) -> int:
        return self._num_layers

    @contextmanager
    def recording(self) -> Iterator[list[LayerOutput]]:
        """Within the block the tower is called, and evaluates nothing; yield what its layers return, in time."""
        outputs: list[LayerOutput] = []
        self._outputs = outputs
        try:
            with running(self._model):
                yield outputs
        finally:
            self._outputs = None

    def _call_of(self, plain: type[nn.Module], *, is_layer: bool) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            returned = plain.__call__(module, *args, **kwargs)
            if self._outputs is not None:
                arrays = output_arrays(returned)
                if is_layer:
                    self._outputs.append(LayerOutput(arrays, []))
                elif self._outputs:
                    self._outputs[-1].beside.extend(arrays)
            return returned

        return call


class Pieces:
    """What is left to evaluate of an image.

    An array that is evaluated keeps nothing of what it was made from, so what a piece has read is freed with it.
    """

    def __init__(self, outputs: Sequence[LayerOutput], result: Sequence[mx.array]) -> None:
        """`result` takes the place of what the last layer returns, which nothing may need (LLaVA)."""
        beside = outputs[-1].beside if outputs else []
        self._left = [*outputs[:-1], LayerOutput(result, beside)]
        self._num = len(self._left)

    def take(self, stop: int, num_pieces: int) -> list[mx.array]:
        """Return what to evaluate until `stop` of `num_pieces` equal pieces are done, and forget it."""
        num_taken = self._num * stop // num_pieces - (self._num - len(self._left))
        taken, self._left = self._left[:num_taken], self._left[num_taken:]
        arrays = [array for each in taken for array in each.beside]
        return [*arrays, *taken[-1].output] if taken else []


def _module_lists(model: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of modules that have parts, in their order; none is inside of a module of another one."""
    found: dict[str, list[nn.Module]] = {}
    named: list[tuple[str, nn.Module]] = model.named_modules()
    for path, module in sorted(named, key=lambda item: (len(item[0]), item[0])):
        owner = _LISTED.sub("", path)
        is_inner = any(path.startswith(f"{each}.") for each in found if each != owner)
        if owner != path and module.children() and not is_inner:
            found.setdefault(owner, []).append(module)
    return [*found.values()]


def _not_now(*arrays: Any) -> None:
    """Evaluate nothing, as a piece does that later."""

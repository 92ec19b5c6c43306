"""Scales the inputs of products by channel, so that they lose less if they are rounded to 8 bits.

Which inputs of a group are large is mostly a property of the model, as SmoothQuant found (Xiao et al. 2023).
A large one is divided by a power of two, and its weights are shifted by as much when they are
unpacked: weights of 4 bits leave room in their bytes, so that nothing else changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from batching.backend.hooks.changes import Changes
from batching.backend.host_array import host_array
from batching.backend.platforms.cpu.layers.experts import Experts, SwitchLinear
from batching.backend.platforms.cpu.layers.linear import Embedding, Linear, Product
from batching.engine.load_slices import ONE_SLICE, LoadSlices

# Inputs that are rounded with one scale.
_GROUP: Final = 16
# More bring no more, by the bundled model.
_MAX_SHIFT: Final = 2
# Tokens whose inputs are looked at.  Random tokens do as well as texts.
_NUM_TOKENS: Final = 128

Shifts = Mapping[str, bytes]
"""The shift of each channel of an input, by the paths of the modules that have weights for it."""


@dataclass
class _Input:
    """An input that some weights are multiplied with, and its largest magnitude of each channel, `[inputs]`.

    seen: all inputs of a model, in the order in which they are multiplied.
    """

    kernels: Any
    seen: list["_Input"]
    paths: list[str] = field(default_factory=list)
    largest: mx.array | None = None

    # In place of the kernels' own products.
    def linear(self, x: mx.array, *args: Any) -> Any:
        self._look(x)
        return self.kernels.linear(x, *args)

    def switch_linear(self, x: mx.array, *args: Any) -> Any:
        self._look(x)
        return self.kernels.switch_linear(x, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def _look(self, x: mx.array) -> None:
        largest = mx.abs(x).reshape(-1, x.shape[-1]).max(axis=0)
        if self.largest is None:
            self.seen.append(self)
        self.largest = largest if self.largest is None else mx.maximum(self.largest, largest)


def find_shifts(
    model: nn.Module, packed: Mapping[str, Any], slices: LoadSlices = ONE_SLICE
) -> Shifts:
    """Return the shifts for inputs that can be scaled of a model whose modules were replaced.

    packed: the weights, by the paths of modules.  Those of one input are scaled all or none.
    slices: is called between two layers.
    """
    changes = Changes()
    try:
        inputs = _watched(model, packed, changes)
        _run(model)
        for each in inputs[0].seen if inputs else ():
            mx.eval(each.largest)
            slices.pause()
    finally:
        changes.undo()
    return {
        path: shifts_of(host_array(each.largest))
        for each in inputs
        if each.largest is not None
        for path in each.paths
    }


def _watched(model: nn.Module, packed: Mapping[str, Any], changes: Changes) -> Sequence[_Input]:
    inputs: dict[int, _Input] = {}
    seen: list[_Input] = []
    fixed: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            # One product after the other.
            changes.set_attribute(module, "__class__", SwitchGLU)
            both = [packed[f"{path}.{name}"] for name in ("gate_proj", "up_proj")]
            if not all(weights.can_scale_inputs for weights in both):
                fixed |= {id(module.gate_proj), id(module.up_proj)}
        owner: Product | SwitchLinear
        if isinstance(module, Linear | Embedding):
            owner = module.product
        elif isinstance(module, SwitchLinear):
            owner = module
        else:
            continue
        if id(owner) not in inputs:
            inputs[id(owner)] = _Input(owner.kernels, seen)
            changes.set_attribute(owner, "kernels", inputs[id(owner)])
        inputs[id(owner)].paths.append(path)
        if not packed[path].can_scale_inputs:
            fixed.add(id(owner))
    return [each for key, each in inputs.items() if key not in fixed]


def _run(model: nn.Module) -> None:
    """Give the model random tokens; what is looked at is computed later."""
    embeddings = [m for m in model.modules() if isinstance(m, Embedding)]
    num_ids = min((e.product.packed[0].shape[0] for e in embeddings), default=0)
    ids = np.random.default_rng(0).integers(0, num_ids, (1, _NUM_TOKENS))
    model(mx.array(ids))


def shifts_of(largest: np.ndarray) -> bytes:
    """Return a shift for each channel `[inputs]`: half of what would make all equally large.

    That is what a channel's weights, which become as much larger, have to lose by it.
    """
    finite = np.nan_to_num(largest.reshape(-1, _GROUP))
    size = np.log2(np.maximum(finite, np.finfo(np.float32).tiny))
    half = (size - size.max(axis=-1, keepdims=True)) / 2
    shifts = np.maximum(np.rint(half) + _MAX_SHIFT, 0)
    shifts -= shifts.min(axis=-1, keepdims=True)
    return bytes(shifts.astype(np.uint8))


def scale_inputs(kernels: Any, packed: Mapping[str, Any], shifts: Shifts) -> None:
    """Round the inputs to 8 bits, scaled; not while anything computes with these weights."""
    alike: dict[bytes, list[Any]] = {}
    for path, of_input in shifts.items():
        alike.setdefault(of_input, []).append(packed[path])
    # Inputs are packed once for weights that share their shifts.
    for of_input, weights in alike.items():
        kernels.scale_inputs(weights, of_input)

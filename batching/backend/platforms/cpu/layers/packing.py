"""How the native kernels store weights."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from batching.backend.hooks.layers import layers_of
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.model_files.gguf_formats import kernel_bits

_PACKED: Final = ("weight", "scales", "biases")
# Of the progress of a load; the self-check follows.
_SHARE_OF_PACKING: Final = 0.8
_LEAST_INPUT_GROUP: Final = 32
_NUMBER: Final = re.compile(r"(^|\.)\d+(\.|$)")


class Stored(Protocol):
    """Weights that were packed before, and the other arrays of their model."""

    @property
    def others(self) -> Mapping[str, mx.array]:
        """Arrays that are not packed, by path."""
        ...

    def packed(self, path: str) -> Any:
        """Return the weights of a module."""
        ...


class StoredDiffers(Exception):
    """The weights that were packed before are not of this model."""


@dataclass
class Packing:
    """Packs weights, a part of the model after the other, or takes those that were packed before.

    input_bits: see `replace_modules`.
    read: gives a part, by its path, its arrays; all that are left for no path.
        None if all are there, or are read when they are computed.
    slices: is called after each part.
    packed, others: what was packed, by the paths of modules, and the other arrays.
    finds_shifts: look at the inputs of the packed model.
    finds_inputs: see which weights share an input.
    shifts, of_one_input: what was found, see the functions of these names.
    """

    kernels: Any
    input_bits: int = 32
    read: Callable[[str], None] | None = None
    stored: Stored | None = None
    slices: LoadSlices = ONE_SLICE
    packed: dict[str, Any] = field(default_factory=dict)
    others: dict[str, mx.array] = field(default_factory=dict)
    finds_shifts: bool = False
    shifts: Mapping[str, bytes] = field(default_factory=dict)
    finds_inputs: bool = False
    of_one_input: Sequence[Sequence[Any]] = ()
    _paths: dict[int, str] = field(default_factory=dict)

    def begin(self, path: str) -> None:
        """Make sure that the arrays of a part are there, unless all was packed before."""
        if self.stored is None and self.read is not None:
            self.read(path)

    def enter(self, path: str, part: nn.Module, is_packed: Callable[[nn.Module], bool]) -> None:
        """Know the modules of a part, and which of its arrays will not be packed.

        Raises:
            StoredDiffers: they are not what was stored.
        """
        prefix = f"{path}." if path else ""
        self._paths = {id(m): f"{prefix}{name}".rstrip(".") for name, m in part.named_modules()}
        left_out = {
            f"{self._paths[id(module)]}.{name}"
            for module in part.modules()
            if is_packed(module)
            for name in _PACKED
        }
        arrays: dict[str, mx.array] = {}
        tree_flatten(part.parameters(), prefix=f".{path}" if path else "", destination=arrays)
        others = {n: a for n, a in arrays.items() if n not in left_out | self.others.keys()}
        if self.stored is not None:
            others = _checked(others, self.stored.others)
            part.load_weights(
                [(n.removeprefix(prefix), a) for n, a in others.items()], strict=False
            )
        self.others |= others

    def of(self, module: nn.Module) -> Any:
        """Return the weights of a module: a matrix, or one for each expert or head."""
        path = self._paths[id(module)]
        packed = self._pack(module) if self.stored is None else self.stored.packed(path)
        self.packed[path] = packed
        return packed

    def _pack(self, module: nn.Module) -> Any:
        if "scales" not in module:
            return self.kernels.pack(module.weight)
        return self.kernels.pack(
            module.weight, module.scales, module.get("biases"), module.bits, self.input_bits
        )

    def end(self, progress: float) -> None:
        """Give back what reading and packing a part has taken; `progress` is the share of the parts so far."""
        mx.clear_cache()
        self.kernels.release_freed()
        self.slices.pause(_SHARE_OF_PACKING * progress)


def _checked(others: Mapping[str, mx.array], stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
    for path, array in others.items():
        found = stored.get(path)
        if found is None or (found.shape, found.dtype) != (array.shape, array.dtype):
            raise StoredDiffers(f"{path} is another array")
    return {path: stored[path] for path in others}


def parts_of(
    model: nn.Module, is_packed: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers with their paths, then what is packed outside of them, then the model.

    Embeddings and what gives the logits may each be larger than a layer.
    """
    layers = layers_of(model)
    yield from layers.items()
    modules = sorted(model.named_modules(), key=lambda item: (len(item[0]), item[0]))
    for path, module in modules:
        # Modules in a list may have one input, and are then packed together.
        if is_packed(module) and not _is_in(path, layers) and not _NUMBER.search(path):
            yield path, module
    yield "", model


def _is_in(path: str, layers: Iterable[str]) -> bool:
    return any(path.startswith(f"{layer}.") for layer in layers)


def is_packable(module: nn.Module) -> bool:
    """Tell whether the kernels know a quantization of what they know."""
    return kernel_bits(module.mode, module.bits, module.group_size) is not None


def input_group(module: nn.Module) -> int:
    """Return how many inputs are packed together, 0 for floats: products of one input have the same."""
    return max(module.group_size, _LEAST_INPUT_GROUP) if "scales" in module else 0


def replace_class(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Make a module an instance of another class, without its arrays."""
    module.clear()
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)

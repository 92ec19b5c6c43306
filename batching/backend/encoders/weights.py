"""Gives an encoder the weights of its files."""

import re
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from batching.errors import ModelLoadError
from batching.model_files.snapshot import WEIGHTS

# What is around the trunk has no such prefix, nor has a trunk that is saved alone.
_PREFIX: Final = re.compile(r"^(bert|roberta|model)\.")
# BERT's first names.
_FORMER: Final = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
_PARTS: Final = ("query", "key", "value")


def read_weights(path: Path) -> dict[str, mx.array]:
    """Return the arrays of all files of a directory, which are read when they are computed.

    Raises:
        ModelLoadError: there are none.
    """
    arrays: dict[str, mx.array] = {}
    for file in sorted(path.glob(WEIGHTS)):
        loaded: Any = mx.load(str(file))
        for name, array in loaded.items():
            name = _PREFIX.sub("", name)
            for former, present in _FORMER:
                name = name.replace(former, present)
            arrays[name] = array
    if not arrays:
        raise ModelLoadError(f"it has no {WEIGHTS}")
    return arrays


def fill(module: nn.Module, arrays: dict[str, mx.array], dtype: mx.Dtype | None) -> None:
    """Give a module its weights; those of no module are ignored.

    dtype: their type; None is the type that most encoders have been stored in.

    Raises:
        ModelLoadError: a tensor is missing, or has another shape or type than the config says.
    """
    weights = []
    expected: dict[str, mx.array] = {}
    tree_flatten(module.parameters(), destination=expected)
    for name, array in expected.items():
        found = _found(name, array.shape, arrays)
        weights.append((name, found if dtype is None else found.astype(dtype)))
    module.load_weights(weights)
    module.eval()


def _found(name: str, shape: tuple[int, ...], arrays: dict[str, mx.array]) -> mx.array:
    if ".qkv." not in name:
        return _checked(name, shape, arrays)
    third = (shape[0] // 3, *shape[1:])
    parts = (name.replace(".qkv.", f".self.{part}.") for part in _PARTS)
    return mx.concatenate([_checked(part, third, arrays) for part in parts])


def _checked(name: str, shape: tuple[int, ...], arrays: dict[str, mx.array]) -> mx.array:
    array = arrays.get(name)
    if array is None:
        raise ModelLoadError(f"its weights have no tensor {name}")
    if array.shape != shape:
        raise ModelLoadError(
            f"its tensor {name} is of shape {list(array.shape)}, and its config says {list(shape)}"
        )
    if not mx.issubdtype(array.dtype, mx.floating):
        raise ModelLoadError(f"its tensor {name} is quantized, which encoders here are not")
    return array

"""Reduces windows, chunks and indexes of a model, so that a short prompt exceeds them in the self-check."""

import re
from collections.abc import Iterator
from typing import Any, Final

import mlx.nn as nn

from batching.backend.hooks.changes import Changes

# As mlx-lm's models call them: `sliding_window`, `window_size`, `attention_chunk_size`, `index_topk`.
# From `floor_scale` positions on, Llama 4 scales queries by their position.
_NAMES: Final = re.compile(r"(^|_)(window(_size)?|chunk_size|index_topk|floor_scale)$")
_SMALL: Final = 8
# The prompts of the check exceed sizes up to this one anyway.
_LARGE: Final = 24


def shrink_sizes(model: nn.Module, changes: Changes) -> bool:
    """Reduce a model's windows and similar sizes; return whether any of them changed."""
    found = [
        (owner, name)
        for owner in _owners(model)
        for name, value in vars(owner).items()
        if type(value) is int and value > _LARGE and _NAMES.search(name)
    ]
    for owner, name in found:
        changes.set_attribute(owner, name, _SMALL)
    return bool(found)


def _owners(model: nn.Module) -> Iterator[Any]:
    """Yield the modules of a model and the configurations that they keep, each once."""
    owners = {
        id(owner): owner
        for module in model.modules()
        for owner in (module, *vars(module).values())
        if hasattr(owner, "__dict__")
    }
    yield from owners.values()

"""The hooks that put rows of images into a step: at the table of embeddings, and behind the first layers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.changes import Changes
from batching.backend.hooks.layers import layers_of


class PlacedRows(NamedTuple):
    """Rows of images in one step.

    rows: which rows of the step they are, int32 `[K]`.
    embeddings: `[K, hidden_size]`, as the table returns them.
    added: what is added to the output of the first layers, `[K, hidden_size]` for each of them.
    """

    rows: mx.array
    embeddings: mx.array
    added: Sequence[mx.array] = ()


class ImageRows:
    """The rows of the step that runs; None is no rows of images."""

    def __init__(self) -> None:
        self.placed: PlacedRows | None = None


def hook_image_rows(
    model: nn.Module, image_rows: ImageRows, num_added: int, changes: Changes
) -> None:
    """Let a model take rows of images in the place of what its table of embeddings has.

    num_added: behind how many layers rows are added (deepstack, Meng et al. 2024).

    Raises:
        LookupError: the model has no table of the usual name.
    """
    _hook_table(_table_of(model), image_rows, changes)
    for index, layer in enumerate([*layers_of(model).values()][:num_added]):
        _hook_layer(layer, index, image_rows, changes)


def _table_of(model: nn.Module) -> nn.Module:
    named: list[tuple[str, nn.Module]] = model.named_modules()
    for path, module in named:
        if path.rpartition(".")[2] == "embed_tokens":
            return module
    raise LookupError("its table of embeddings has another name than embed_tokens")


def _hook_table(table: nn.Module, image_rows: ImageRows, changes: Changes) -> None:
    plain = type(table)

    def call(self: nn.Module, ids: mx.array) -> mx.array:
        embeddings: mx.array = plain.__call__(self, ids)
        if (placed := image_rows.placed) is not None:
            embeddings[placed.rows] = placed.embeddings.astype(embeddings.dtype)[:, None]
        return embeddings

    changes.override_call(table, call)


def _hook_layer(layer: nn.Module, index: int, image_rows: ImageRows, changes: Changes) -> None:
    plain = type(layer)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = plain.__call__(self, *args, **kwargs)
        placed = image_rows.placed
        if placed is None or index >= len(placed.added):
            return output
        added = placed.added[index].astype(output.dtype)[:, None]
        return output.at[placed.rows].add(added)

    changes.override_call(layer, call)

"""Divides a model among ranks: heads of attention, and rows of the layers behind it."""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

from batching.backend.exceptions import one_line
from batching.errors import ModelLoadError


def divide(model: nn.Module, group: mx.distributed.Group) -> None:
    """Replace layers of a model by the parts of a rank, as mlx-lm does; arrays stay unread.

    Raises:
        ModelLoadError: mlx-lm does not divide models of its type, or not by this number of ranks.
    """
    num_ranks = group.size()
    shard = getattr(model, "shard", None)
    if shard is None:
        raise ModelLoadError(
            f"mlx-lm does not divide models of the type {getattr(model, 'model_type', '?')} among ranks"
        )
    before = dict(_counts(model))
    try:
        shard(group)
    except Exception as error:
        # Its own code, and arrays of any shape.
        reason = _undivided_heads(before, num_ranks) or one_line(error)
        raise ModelLoadError(_cannot(num_ranks, reason)) from error
    for name, count in _counts(model):
        # mlx-lm rounds down.
        whole = before.get(name, count)
        if count != whole and count * num_ranks != whole:
            raise ModelLoadError(_cannot(num_ranks, f"{name.rpartition('.')[2]} is {whole}"))


def _cannot(num_ranks: int, reason: str) -> str:
    return f"the model cannot be divided among {num_ranks} ranks: {reason}"


def _undivided_heads(counts: dict[str, int], num_ranks: int) -> str:
    heads = ((name.rpartition(".")[2], count) for name, count in counts.items() if "heads" in name)
    return next((f"{name} is {count}" for name, count in heads if count % num_ranks), "")


def _counts(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers that modules keep, with their paths."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is int:
                yield f"{path}.{name}", value

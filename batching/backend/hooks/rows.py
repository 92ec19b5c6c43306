"""The hook that computes logits only for the rows that need them."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.hooks.changes import Changes


class RowSelection:
    """Which rows of a forward pass get logits, and what the pass tells about its hidden states.

    rows: the rows that get logits; None is all of them.
    are_finite: bool `[T]`, whether the hidden state of each row of the latest pass is finite.
    pooled_rows: the rows whose hidden states are pooled; None is no rows.
    hidden: the hidden states of these, `[P, hidden_size]`.
    is_hooked: False if the model could not be hooked: it computes all logits and shows no hidden states.
    """

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.are_finite: mx.array | None = None
        self.pooled_rows: mx.array | None = None
        self.hidden: mx.array | None = None
        self.is_hooked = False

    def of(self, hidden: mx.array) -> mx.array:
        """Return the selected rows of hidden states `[T, 1, hidden_size]`."""
        if self.rows is None:
            return hidden
        self.are_finite = mx.isfinite(hidden).all(axis=(1, 2))
        if self.pooled_rows is not None:
            self.hidden = hidden[self.pooled_rows].squeeze(1)
        return hidden[self.rows]


def select_rows(model: nn.Module, selection: RowSelection, changes: Changes) -> None:
    """Make the model's head see only the selected rows.

    Heads differ (tied, soft-capped, scaled), so the model's own head runs, on fewer rows: the module that
    owns the layers becomes a subclass of itself that returns only part of its hidden states
    `[T, 1, hidden_size]`.  A model whose trunk is not a module of its own still computes all logits.
    """
    trunk = _trunk(model)
    if trunk is None:
        return
    trunk_type = type(trunk)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return selection.of(trunk_type.__call__(self, *args, **kwargs))

    changes.override_call(trunk, call)
    selection.is_hooked = True


def hidden_size_of(model: nn.Module) -> int | None:
    """Return the size of the hidden states that the head gets; None if they cannot be observed.

    Only shapes are evaluated, nothing is computed.
    """
    if (trunk := _trunk(model)) is None:
        return None
    try:
        hidden = trunk(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
    except Exception:
        # Any code can be in a model file.
        return None
    return hidden.shape[-1] if isinstance(hidden, mx.array) else None


def _trunk(model: nn.Module) -> nn.Module | None:
    """Return the module that owns the layers, unless that is the model itself."""
    # `model.layers` may be a list of its own over the same layers.
    first = model.layers[0]
    others = (module for module in model.modules() if module is not model)
    return next((m for m in others if any(layer is first for layer in m.get("layers", ()))), None)

"""Runs modules that cannot process the ragged rows of a step on one piece of it at a time.

A recurrence is sequential, and a model's own attention needs the keys of one request.  Such modules
get the rows of a piece in the shapes that mlx-lm's models expect, `[1, L, ...]` for a chunk or
`[B, 1, ...]` for decodes, and caches for that piece.  The rest of the model stays ragged.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.call_rows import called_with_piece
from batching.backend.hooks.changes import Changes
from batching.backend.paged.gathered_cache import GatheredLayerCache
from batching.backend.paged.kv_cache import CacheTuple, StepInputs
from batching.backend.paged.pieces import DeferredMask, Piece
from batching.backend.paged.state_cache import StateCache

PieceCache = StateCache | GatheredLayerCache


def regroup(module: nn.Module, changes: Changes) -> None:
    """Make a module process the pieces of a step one after the other."""
    plain = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        caches = list(_caches((args, kwargs)))
        if not caches:
            # It runs on caches of mlx-lm, or within a module that is regrouped itself.
            return plain.__call__(self, *args, **kwargs)
        step = caches[0].step
        assert isinstance(step, StepInputs)
        outputs = []
        for piece in _pieces(step, caches):
            entered = _Entering(step, piece)
            with called_with_piece(piece):
                output = plain.__call__(
                    self, *map(entered.of, args), **{k: entered.of(v) for k, v in kwargs.items()}
                )
            outputs.append(_left(output, piece))
        return outputs[0] if len(outputs) == 1 else _joined(outputs)

    changes.override_call(module, call)


def _caches(value: Any) -> Iterator[PieceCache]:
    """Find the caches among arguments."""
    if isinstance(value, PieceCache):
        yield value
    elif isinstance(value, dict):
        yield from _caches(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _caches(item)


def _pieces(step: StepInputs, caches: Sequence[PieceCache]) -> Iterator[Piece]:
    """Yield the pieces of the step; decodes are together only if they can share a call."""
    states = [cache for cache in caches if isinstance(cache, StateCache)]
    for piece in step.pieces:
        if piece.is_chunk or not states:
            yield piece
        else:
            yield from piece.split(lambda s: tuple(state.can_share(s) for state in states))


class _Entering:
    """Converts the arguments of a ragged call into those for one piece."""

    def __init__(self, step: StepInputs, piece: Piece) -> None:
        self._step = step
        self._piece = piece
        self._num_rows = len(step.positions)

    def of(self, value: Any) -> Any:
        match value:
            case StateCache() | GatheredLayerCache():
                return value.piece(self._piece)
            case DeferredMask():
                return value.of(self._piece)
            case CacheTuple():
                return tuple(map(self.of, value))
            case list() | tuple():
                return type(value)(map(self.of, value))
            case mx.array() if value is self._step.positions:
                return self._piece.offset
            case mx.array() if value.ndim and value.shape[0] == self._num_rows:
                return self._piece.enter(value)
        return value


def _left(output: Any, piece: Piece) -> Any:
    match output:
        case mx.array():
            return piece.leave(output)
        case list() | tuple():
            return type(output)(_left(item, piece) for item in output)
    return output


def _joined(outputs: Sequence[Any]) -> Any:
    """Join the outputs of the pieces into what the ragged call returns."""
    first = outputs[0]
    match first:
        case mx.array():
            return mx.concatenate(list(outputs))
        case list() | tuple():
            return type(first)(_joined(items) for items in zip(*outputs, strict=True))
    return first

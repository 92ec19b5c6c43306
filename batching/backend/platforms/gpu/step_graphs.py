"""Keeps the compute graphs of decode steps and uses them again.

For a small model, Python and MLX take longer to build the graph of a step than a fast GPU takes to
compute it.  A graph that `mx.compile` has traced is replayed without Python.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx
import numpy as np

from batching.backend.exceptions import one_line
from batching.backend.hooks.rows import RowSelection
from batching.backend.paged.kv_cache import PagedKVCache, StepInputs, cache_leaves
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.platforms.gpu.kernel_pool import KernelLayerCache
from batching.backend.platforms.gpu.step_rows import KernelAttention

logger = logging.getLogger(__name__)

# To trace a step takes as long as to build it two or three times: steps whose shapes do not come again are not.
COMPILE_AT: Final = 4
# With 36 layers each takes a MiB or two: its nodes, and the texts of their kernels.
_MOST: Final = 32

# From a step, the logits of the selected rows, `[L, vocab_size]`.
Build = Callable[[StepInputs], mx.array]
# Returns logits, whether rows are finite if the model tells, and what orders the kernels from now on.
_Graph = Callable[..., tuple[mx.array, list[mx.array], list[mx.array]]]
_Shapes = tuple[tuple[int, ...], ...]


@dataclass
class _Seen:
    """Steps of the same shapes: how many there were, and their graph once they are many."""

    times: int = 0
    graph: _Graph | None = None


class StepGraphs:
    """The graphs of decode steps, by the shapes of their inputs.

    Everything that differs between two steps is an input of the graph: tokens and positions, the tables of
    each row, the pool's arrays, and the tokens that order the kernels.  The weights are part of the graph.
    The graphs of steps with prompt chunks are built each time.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        selection: RowSelection,
        *,
        is_check: bool = False,
        most: int = _MOST,
    ) -> None:
        """is_check: the first step of its shapes is traced, and if that fails, it is raised."""
        self._layers = [layer for layer in cache.layers if isinstance(layer, KernelLayerCache)]
        self._selection = selection
        self._is_check, self._most = is_check, most
        self._seen: OrderedDict[_Shapes, _Seen] = OrderedDict()
        # Through which windows the rows of a step see, in layers with blocks of their own and in others.
        self._windows: dict[bool, list[SlidingWindow | None]] | None = None
        self._is_on = self._layers == list(cache_leaves(cache.caches))

    def logits(self, step: StepInputs, build: Build) -> mx.array:
        """Return what `build` returns, by a kept graph if there were enough steps of the same shapes."""
        if not self._is_on or any(map(_has_chunks, self._steps.values())):
            return build(step)
        if self._windows is None:
            logits = build(step)
            self._windows = {key: _rows(each).windows for key, each in self._steps.items()}
            return logits
        inputs = self._inputs(step)
        seen = self._noticed(tuple(array.shape for array in inputs))
        if seen.graph is not None:
            return self._run(seen.graph, inputs)
        if seen.times < COMPILE_AT and not self._is_check:
            return build(step)
        return self._traced(seen, step, inputs, build)

    @property
    def _steps(self) -> dict[bool, StepInputs]:
        """The step as layers with blocks of their own have it, and as others do."""
        return {layer.is_windowed: layer.step for layer in self._layers}

    def _noticed(self, shapes: _Shapes) -> _Seen:
        seen = self._seen.setdefault(shapes, _Seen())
        seen.times += 1
        self._seen.move_to_end(shapes)
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return seen

    def _inputs(self, step: StepInputs) -> list[mx.array]:
        assert self._windows is not None
        arrays = [step.tokens, step.positions, step.logit_rows.rows]
        for key, each in self._steps.items():
            arrays += _rows(each).arrays(each.slots, each.positions, self._windows[key])
        return arrays

    def _traced(
        self, seen: _Seen, step: StepInputs, inputs: Sequence[mx.array], build: Build
    ) -> mx.array:
        """Return the logits by a new graph, or build the step if the model's code cannot be traced."""
        states = [layer.state for layer in self._layers]
        steps = self._steps
        graph: _Graph = mx.compile(self._of_inputs(step, build))
        try:
            logits = self._run(graph, inputs)
        except Exception as error:
            if self._is_check:
                raise
            # Its code reads numbers, perhaps.
            logger.warning("decode steps are built one by one: %s", one_line(error))
            self._is_on = False
            for layer, state in zip(self._layers, states, strict=True):
                layer.begin(steps[layer.is_windowed])
                layer.state = state
            return build(step)
        for layer in self._layers:
            layer.begin(steps[layer.is_windowed])
        seen.graph = graph
        return logits

    def _run(self, graph: _Graph, inputs: Sequence[mx.array]) -> mx.array:
        states = [layer.state for layer in self._layers]
        logits, are_finite, tokens = graph(inputs, states)
        for layer, state, token in zip(self._layers, states, tokens, strict=True):
            layer.state = (*state[:-1], token)
        self._selection.are_finite = are_finite[0] if are_finite else None
        return logits

    def _of_inputs(self, step: StepInputs, build: Build) -> _Graph:
        """Return the function that is traced: of arrays in the order of `_inputs`, and of the layers' states.

        It is kept, and knows no request.
        """
        rows = replace(step.logit_rows, samples=(), sample_rows=(), scores=())
        unknown = {key: _rows(each).unknown() for key, each in self._steps.items()}
        windows = self._windows
        assert windows is not None

        def run(
            inputs: Sequence[mx.array], states: Sequence[Sequence[mx.array]]
        ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
            left = iter(inputs)
            tokens, positions, logit_rows = next(left), next(left), next(left)
            traced = {
                key: StepInputs(
                    tokens,
                    positions,
                    # None that are known now may become part of the graph.
                    np.zeros(0, np.int64),
                    replace(rows, rows=logit_rows),
                    attention.of_arrays(left, windows[key]),
                )
                for key, attention in unknown.items()
            }
            for layer, state in zip(self._layers, states, strict=True):
                layer.begin(traced[layer.is_windowed])
                layer.state = tuple(state)
            logits = build(traced[self._layers[0].is_windowed])
            for layer in self._layers:
                layer.flush()
            finite = self._selection.are_finite
            orders = [layer.state[-1] for layer in self._layers]
            return logits, [] if finite is None else [finite], orders

        return run


def _rows(step: StepInputs) -> KernelAttention:
    assert isinstance(step.attention, KernelAttention)
    return step.attention


def _has_chunks(step: StepInputs) -> bool:
    return _rows(step).num_decoded < len(step.slots)

"""A model that the self-check has found to be right in some mode, on some form of its platform."""

from dataclasses import dataclass

from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.hooks.rows import RowSelection
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import CacheLayout
from batching.backend.platform import Graphs, Platform

_IN_BATCHES = (ExecutionMode.RAGGED, ExecutionMode.PIECES)


@dataclass(frozen=True)
class CheckedModel:
    """How a model is served.

    platform: the form of it on which the model is right.
    selection: the hook that selects the rows for logits; it is in the model already.
    """

    platform: Platform
    layout: CacheLayout
    selection: RowSelection
    result: CheckResult

    @property
    def mode(self) -> ExecutionMode:
        return self.result.mode

    @property
    def reason(self) -> str:
        return self.result.reason

    @property
    def is_invariant(self) -> bool:
        """Whether on the native kernels no bit of a row depends on others: MLX computes no attention."""
        is_gathered = any(shape.is_gathered for shape in self.layout.shapes)
        return self.mode in _IN_BATCHES and not is_gathered

    def cache(
        self, num_blocks: int, block_size: int, *, num_window_blocks: int = 0
    ) -> PagedKVCache:
        """Return an empty pool."""
        return self.platform.make_pool(
            self.layout.layers,
            num_blocks,
            block_size,
            num_window_blocks=num_window_blocks,
            one_by_one=self.mode not in _IN_BATCHES,
        )

    def graphs(self, cache: PagedKVCache, *, is_check: bool = False) -> Graphs | None:
        """Return what keeps the graphs of decode steps; None if they are built each time.

        is_check: the first step that can be kept is.
        """
        return self.platform.graphs(cache, self.selection, is_check=is_check)

"""How a model is served, and what the runner needs to know of that."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from batching.backend.choose_pool import kv_cache
from batching.backend.devices import Gpu
from batching.backend.gpu.pool_kernels import ON_CPU, NoKernels, PoolKernels
from batching.backend.gpu.step_graphs import StepGraphs
from batching.backend.hooks.rows import RowSelection
from batching.backend.native.sampling import native_sampler
from batching.backend.native_loader import Native
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import CacheLayout
from batching.backend.sampling.sampler import Sampler, draw_on_device


class Way(StrEnum):
    """How much of a model runs for all rows of a step at once, from most to least.

    RAGGED: all of it.  PIECES: but for modules with a state or with attention of their own, which
    get chunks one by one and decodes together.  ONE_BY_ONE: these get a request at a time.
    WHOLE: the model runs for a request at a time, on the pool.  OWN: likewise, on its own caches.
    """

    RAGGED = "ragged"
    PIECES = "pieces"
    ONE_BY_ONE = "one by one"
    WHOLE = "whole model"
    OWN = "own caches"


class Verdict(NamedTuple):
    """A way, and how it is made.

    gathers_all: no attention is trusted to read nothing but what it seems to read.
    reason: why faster ways are wrong, for the operator to read; empty if there is none.
    """

    way: Way
    gathers_all: bool = True
    reason: str = ""


@dataclass(frozen=True)
class CheckedModel:
    """What the runner needs to know; `selection` is hooked into the model already.

    native: the kernels that the model's modules and its pool use.
    rounds_inputs: the model's products round theirs, so attention does, too.
    gpu: what computes; None is the CPU.
    kernels: those of the pool on a GPU, or why it has none.
    keeps_graphs: with them, decode steps whose graphs are kept are right, too.
    """

    layout: CacheLayout
    selection: RowSelection
    verdict: Verdict
    native: Native | None = None
    rounds_inputs: bool = False
    gpu: Gpu | None = None
    kernels: PoolKernels | NoKernels = ON_CPU
    keeps_graphs: bool = True

    @property
    def way(self) -> Way:
        return self.verdict.way

    @property
    def is_invariant(self) -> bool:
        """Whether on the native kernels no bit of a row depends on others: MLX computes no attention."""
        is_gathered = any(shape.is_gathered for shape in self.layout.shapes)
        return self.way in (Way.RAGGED, Way.PIECES) and not is_gathered

    @property
    def reason(self) -> str:
        return self.verdict.reason

    def cache(
        self, num_blocks: int, block_size: int, *, num_window_blocks: int = 0
    ) -> PagedKVCache:
        """Return an empty pool."""
        return kv_cache(
            self.layout,
            num_blocks,
            block_size,
            self.native,
            gpu=self.gpu,
            kernels=self.kernels,
            num_window_blocks=num_window_blocks,
            one_by_one=self.way not in (Way.RAGGED, Way.PIECES),
            rounds_inputs=self.rounds_inputs,
        )

    def graphs(self, cache: PagedKVCache, *, is_check: bool = False) -> StepGraphs | None:
        """Return what keeps the graphs of decode steps; None without kernels, or if they are not right so.

        is_check: as for `StepGraphs`.
        """
        if isinstance(self.kernels, NoKernels) or not self.keeps_graphs:
            return None
        return StepGraphs(cache, self.selection, is_check=is_check)

    def sampler(self) -> Sampler | None:
        """Return what samples, if not numpy."""
        if self.native:
            return native_sampler(self.native.module)
        return Sampler(draw_on_device) if self.gpu else None

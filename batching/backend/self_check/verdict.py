"""How a model is served: the result of the self-check."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from batching.backend.choose_pool import kv_cache
from batching.backend.devices import Gpu
from batching.backend.hooks.rows import RowSelection
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import CacheLayout
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.sampling import native_sampler
from batching.backend.platforms.gpu.pool_kernels import ON_CPU, NoKernels, PoolKernels
from batching.backend.platforms.gpu.step_graphs import StepGraphs
from batching.backend.sampling.sampler import Sampler, draw_on_device


class Way(StrEnum):
    """How much of a model runs for all rows of a step at once; the fastest way first.

    RAGGED: the whole model.
    PIECES: all but modules with a recurrent state or with attention of their own; these get prompt chunks
        one by one, and all decodes together.
    ONE_BY_ONE: likewise, but these modules get one request at a time.
    WHOLE: the model runs for one request at a time, on the pool.
    OWN: the model runs for one request at a time, on caches of its own.
    """

    RAGGED = "ragged"
    PIECES = "pieces"
    ONE_BY_ONE = "one by one"
    WHOLE = "whole model"
    OWN = "own caches"


class Verdict(NamedTuple):
    """A way of serving a model, in the form in which it is stored.

    gathers_all: the keys and values of all layers are gathered, in case attention reads more of the
        cache than was observed.
    reason: why faster ways are wrong, for the operator; empty if there is no faster one.
    """

    way: Way
    gathers_all: bool = True
    reason: str = ""


@dataclass(frozen=True)
class CheckedModel:
    """What the runner needs to know of a model that was checked.

    selection: the hook that selects the rows for logits; it is in the model already.
    native: the native kernels that the model's modules and its pool use; None without.
    rounds_inputs: the model's products round their inputs, so attention does as well.
    gpu: the GPU that computes; None is the CPU.
    kernels: the kernels of a GPU's pool, or why there are none.
    keeps_graphs: decode steps are also right with graphs that are kept and used again.
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

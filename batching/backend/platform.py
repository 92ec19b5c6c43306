"""The interface of a platform, on which models run: MLX alone, the native CPU kernels, or a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import mlx.core as mx
import mlx.nn as nn

from batching.backend.adapters.linears import AdaptedLinears, LinearModules
from batching.backend.encoders.encoder import PlainTrunk, Trunk
from batching.backend.execution_mode import CheckResult
from batching.backend.gguf.model import arrays_of
from batching.backend.hooks.changes import Changes
from batching.backend.hooks.rows import RowSelection
from batching.backend.loader import LoadedModel
from batching.backend.paged.kv_cache import PagedKVCache, StepInputs
from batching.backend.paged.layout import CacheLayout, LayerLayout
from batching.backend.sampling.sampler import Sampler
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.scheduling.stall_budget import MIN_CHUNK


class MakePool(Protocol):
    """Makes an empty pool.

    num_blocks, block_size: of the pool, and tokens per block.
    num_window_blocks: blocks of the pool of sliding-window layers; 0 lets them share the main pool.
    one_by_one: modules with a state, or with attention of their own, get one request at a time.
    """

    def __call__(
        self,
        layers: Sequence[LayerLayout],
        num_blocks: int,
        block_size: int,
        *,
        num_window_blocks: int = ...,
        one_by_one: bool = ...,
    ) -> PagedKVCache: ...


@dataclass(frozen=True)
class Instead:
    """The model has to be loaded again, on another platform.

    reason: for the operator; empty if that is no news.
    """

    platform: "Platform"
    reason: str = ""


@dataclass
class PreparedModel:
    """A model with its weights as a platform computes with them.

    loaded: the model is ready for the self-check.
    known_result: the result of the self-check at an earlier start; None if it is not known.
    source: where the weights come from, for the start-up banner; empty if they are as loaded.
    """

    loaded: LoadedModel
    known_result: CheckResult | None = None
    source: str = ""

    def finish(self, result: CheckResult, *, is_invariant: bool) -> Instead | None:
        """Make the model ready for requests, or say where else it has to run.

        is_invariant: no bit of a row depends on the other rows of a step.
        """
        return None

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights."""
        return sum(array.nbytes for array in arrays_of(self.loaded.model))

    @property
    def note(self) -> str:
        """How products round, for the start-up banner."""
        return ""

    def packed_linears(self, paths: Collection[str]) -> AdaptedLinears | None:
        """Return what adds adapters to layers that are no modules of MLX any more; None if all are.

        paths: of the layers that may take adapters.
        """
        return None


class Graphs(Protocol):
    """The compute graphs of decode steps, which are kept."""

    def logits(self, step: StepInputs, build: Callable[[StepInputs], mx.array]) -> mx.array:
        """Return the logits of the rows that need them, `[L, vocab_size]`.

        build: builds the graph of a step, for which none is kept.
        """
        ...


class Platform(ABC):
    """The choices for a model that follow from the settings and the machine; it holds nothing of a model."""

    @property
    @abstractmethod
    def weights_dtype(self) -> mx.Dtype | None:
        """The type to which weights are converted; None keeps them as they are stored."""

    @property
    @abstractmethod
    def kv_dtype(self) -> mx.Dtype | None:
        """The type of keys and values; None is the type in which the model makes them."""

    # A model, before and after the self-check

    # Weights are read when the platform packs them, not when a model is loaded.
    packs_weights: ClassVar[bool] = False

    def prepare(
        self,
        loaded: LoadedModel,
        model_id: str,
        changes: Changes,
        slices: LoadSlices = ONE_SLICE,
    ) -> PreparedModel | Instead:
        """Return the model with its weights as the platform computes with them."""
        return PreparedModel(loaded)

    def hook(self, model: nn.Module, changes: Changes) -> None:  # noqa: B027
        """Change how a model calls MLX, whatever mode it runs in."""

    def fallback(self, reason: str) -> Instead | None:
        """Return the platform for a model that does not run on this one, for a reason; None if there is no other.

        Raises:
            ModelLoadError: the settings cannot be kept there.
        """
        return None

    def confirm(self, model_id: str, layout: CacheLayout) -> None:  # noqa: B027
        """Warn of what the platform does not do for a model as it was checked.

        Raises:
            ModelLoadError: it is required.
        """

    # The self-check

    # It ends with steps over a long context, with all sizes of the model as they are.
    checks_long_context: ClassVar[bool] = False

    @property
    def accelerated(self) -> Sequence["Platform"]:
        """The forms of this platform that a model is to be checked on; the fastest one first.

        They differ in what a step runs on, not in the model; without any, the platform is one by itself.
        """
        return ()

    def portable(self, reason: str) -> Self:
        """Return the form of this platform on which any model runs.

        reason: why the faster forms are not used.
        """
        return self

    def unsupported(self, layout: CacheLayout) -> str:
        """Return why the accelerated forms have no pool of this layout; empty if they do."""
        return ""

    def hook_mode(self, model: nn.Module, changes: Changes) -> None:  # noqa: B027
        """Change a model for the accelerated forms, in a mode in which rows are ragged."""

    def serving(self, model: nn.Module) -> Self:
        """Return the platform as it serves a model that is prepared: it may round as the model's products do."""
        return self

    @property
    def unrounded(self) -> Self:
        """The platform with attention that does not round."""
        return self

    # Parts that run a step

    @property
    @abstractmethod
    def holds_int8(self) -> bool:
        """Whether its pool can have keys and values of 8 bits."""

    @property
    @abstractmethod
    def make_pool(self) -> MakePool:
        """Makes the kind of pool that is fastest here."""

    def linear_modules(
        self, modules: Mapping[str, nn.Module], num_adapters: int, changes: Changes
    ) -> AdaptedLinears:
        """Return what adds adapters to linear modules of MLX, by their paths in the model."""
        return LinearModules(modules, changes)

    def sampler(self) -> Sampler | None:
        """Return what samples; None is numpy."""
        return None

    def graphs(
        self, cache: PagedKVCache, selection: RowSelection, *, is_check: bool = False
    ) -> Graphs | None:
        """Return what keeps the graphs of decode steps; None builds the graph of each step.

        is_check: the first step that can be kept is.
        """
        return None

    @property
    def compiles_kernels(self) -> bool:
        """Whether the first step compiles kernels for the blocks of the pool."""
        return False

    def encoder_trunk(self, trunk: PlainTrunk, max_tokens: int, max_texts: int) -> Trunk:
        """Return a trunk as it is fastest here, for steps of at most so many tokens and texts.

        Raises:
            Exception: it does not run here; the plain one does.
        """
        return trunk

    # Values for the scheduler

    # The value of this name in `SchedulerConfig`.
    min_copied_tokens: ClassVar[int | None] = None

    @property
    def min_chunk(self) -> int:
        """The prompt tokens that a step may always process."""
        return MIN_CHUNK

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, object]:
        """What the last bits of keys and values depend on here, beside the model and its weights' type."""

    # The start-up banner, and the end

    @abstractmethod
    def device_line(self, weights: str) -> str: ...

    @abstractmethod
    def kernels_line(self, note: str) -> str: ...

    def wire(self) -> str:
        """Keep in place what is in memory now, once that is all of a model; return the limits of memory.

        They are for the start-up banner; empty if there are none.
        """
        return ""

    def release(self) -> None:  # noqa: B027
        """Give memory back to the system that belonged to a model which is gone."""

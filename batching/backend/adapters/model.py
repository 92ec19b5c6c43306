"""The adapters of an executor: what is in its slots, and which rows of a step have which."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from batching.adapters.adapter import NO_SLOT, AdaptableLayers, Adapter
from batching.adapters.files.adapter_file import mark_failing, opened
from batching.adapters.files.fitting import fitted
from batching.adapters.low_rank import LowRank
from batching.adapters.slots import AdapterLoad
from batching.backend.adapters.linears import AdaptedLinears
from batching.backend.exceptions import forget_locals, one_line
from batching.backend.hooks.call_rows import CallRows, called_with
from batching.backend.sampling.slice_sampler import request_ids
from batching.errors import AdapterChanged
from batching.fit.weights import adapter_bytes
from batching.steps.model_runner import SlicesFailed
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import Slice, StepPlan

logger = logging.getLogger(__name__)

# Returns the numbers of an adapter for the layers of a model, by their paths.
ReadAdapter = Callable[[Adapter, AdaptableLayers], Mapping[str, LowRank]]


def read_adapter(adapter: Adapter, layers: AdaptableLayers) -> Mapping[str, LowRank]:
    """Read the numbers of an adapter that was opened before.

    Raises:
        AdapterError: its files are gone or others, or do not fit the layers.
    """
    return fitted(opened(adapter), layers)


class ModelAdapters:
    """Loads adapters into slots, and lets the linear layers of a model add them to the rows of a step.

    layers: those that take adapters.
    """

    def __init__(
        self,
        kinds: Sequence[AdaptedLinears],
        layers: AdaptableLayers,
        read: ReadAdapter = read_adapter,
    ) -> None:
        self.layers = layers
        self._kinds = kinds
        self._read = read
        # Why what was to be in a slot is not there, and what clients are told of it.
        self._failed: dict[int, tuple[Exception, str]] = {}

    def load(self, plan: StepPlan) -> None:
        """Fill slots as a plan orders it.

        Raises:
            SlicesFailed: slices of the plan have adapters that cannot be read.
        """
        for order in plan.adapters:
            self._failed.pop(order.slot, None)
            try:
                self._put(order)
            except Exception as error:
                # Arrays may not fit in memory.
                forget_locals(error)
                adapter = order.adapter
                logger.warning(
                    "cannot load the adapter %s of %s: %s", adapter, adapter.path, one_line(error)
                )
                self._failed[order.slot] = error, _reason(adapter, error)
        if failing := [s for s in plan.slices if s.adapter_slot in self._failed]:
            # Those with another adapter start again, and fail by themselves.
            slot = failing[0].adapter_slot
            cause, reason = self._failed[slot]
            raise SlicesFailed(
                request_ids(s for s in failing if s.adapter_slot == slot), reason
            ) from cause

    @contextmanager
    def running(self, slices: Sequence[Slice]) -> Iterator[None]:
        """Within the block, the model is called with the rows of slices; each gets what its adapter adds."""
        if not are_adapted(slices):
            yield
            return
        with called_with(self, slices):
            yield

    def use(self, rows: CallRows | None) -> None:
        """Let the layers that are called from now on add to these rows."""
        for kind in self._kinds:
            kind.use(rows)

    def reset(self) -> None:
        """Empty all slots."""
        self._failed.clear()
        for kind in self._kinds:
            kind.clear()

    def _put(self, order: AdapterLoad) -> None:
        weights = self._read(order.adapter, self.layers)
        for kind in self._kinds:
            kind.put(order.slot, {path: weights[path] for path in weights.keys() & kind.paths})


def _reason(adapter: Adapter, error: Exception) -> str:
    # Other messages name folders of this machine.
    is_known = isinstance(error, AdapterChanged)
    return str(error) if is_known else f"the adapter '{adapter}' cannot be loaded"


def mark_overflowing(error: Exception, sequences: Mapping[int, SequenceState]) -> None:
    """Have no more requests with the adapters whose rows were not finite, if that is what a step failed for."""
    if not (isinstance(error, SlicesFailed) and isinstance(error.__cause__, FloatingPointError)):
        return
    adapters = {sequences[each].spec.adapter for each in error.request_ids}
    if None in adapters:
        # The base is at fault.
        return
    for adapter in adapters:
        assert adapter is not None
        mark_failing(adapter, f"the adapter '{adapter}' gives numbers that are not finite")


def are_adapted(slices: Sequence[Slice]) -> bool:
    """Return whether a step has rows with an adapter."""
    return any(s.adapter_slot != NO_SLOT for s in slices)


def largest_adapter(layers: AdaptableLayers) -> int:
    """Return the bytes of an adapter of the largest rank on all layers."""
    return adapter_bytes(
        sum(each.inputs + each.outputs for each in layers.layers.values()), layers.max_rank
    )

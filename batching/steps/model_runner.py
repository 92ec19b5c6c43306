"""The border between the pure scheduler and the tensors."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from batching.request import BatchRequest
from batching.steps.step_plan import SliceOutput, StepPlan


class SlicesFailed(Exception):
    """Only these requests of a plan are at fault; the others can start over on a new pool."""

    def __init__(self, request_ids: Iterable[int]) -> None:
        self.request_ids = frozenset(request_ids)
        super().__init__(f"requests {sorted(self.request_ids)} cannot be sampled")


class ModelRunner(Protocol):
    """Processes a plan's tokens, writes their KV into the pool, and samples.

    Recurrent states, which it keeps in the slots that a plan names, cannot change once made.

    The tests' fake is in tests/support/fakes.py; its pool contains token ids.
    """

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        """Return an output for each slice, in the plan's order.

        Of a slice that samples, the first token follows the tokens of the request, the next
        one the first draft, and so on; each fork's one follows the tokens of the request.

        Raises:
            SlicesFailed: these requests fail, whatever is batched with them.
            Exception: the step failed, and no request of it can be singled out.
        """
        ...

    def reset(self) -> None:
        """Make the pool usable again after `run` raised; its contents and all states are lost."""
        ...


StepT = TypeVar("StepT", bound="QueuedStep")


class QueuedStep(Protocol):
    """A step that is being computed."""

    def collect(self) -> Sequence[SliceOutput]:
        """Wait for its end, and return what `ModelRunner.run` does; raise what that raises."""
        ...


class PipelinedRunner(ModelRunner, Protocol[StepT]):
    """A model runner that computes steps in the order in which they are queued, while others are planned."""

    def can_follow(self, request: BatchRequest) -> bool:
        """Return whether the token after the one that a step in flight samples can be sampled."""
        ...

    def submit(self, plan: StepPlan, after: StepT | None = None) -> StepT:
        """Queue a step.

        after: the step in flight that samples the tokens which the requests of this one expect, if any
            does.

        Raises:
            Exception: as `run`.
        """
        ...

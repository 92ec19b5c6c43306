"""The interface between the scheduler, which knows no tensors, and the code that runs the model."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from batching.inputs.sampling_params import SamplingParams
from batching.steps.step_plan import SliceOutput, StepPlan


class SlicesFailed(Exception):
    """Some requests of a step cannot be served; the other requests of the step are not at fault.

    reasons: a message for their clients; empty if there is none.
    """

    def __init__(self, request_ids: Iterable[int], *reasons: str) -> None:
        self.request_ids = frozenset(request_ids)
        self.reasons = reasons
        why = ": ".join(("cannot be served", *reasons))
        super().__init__(f"requests {sorted(self.request_ids)} {why}")


class ModelRunner(Protocol):
    """Runs a plan: processes its tokens, writes their keys and values into the pool, and samples.

    The runner also keeps recurrent states, in the slots that the plan names; a state is never modified
    once it is made.

    The tests use a fake whose pool contains token ids (tests/support/fakes.py).
    """

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        """Return one output for each slice, in the order of the plan.

        For a slice that samples, the first token follows the tokens of the request, the second one follows
        the first draft, and so on; the tokens of its forks follow the tokens of the request.

        Raises:
            SlicesFailed: only these requests are at fault.
            Exception: the step failed, and no request can be singled out.
        """
        ...

    def reset(self) -> None:
        """Make the pool usable after `run` has raised; its contents, states and sequences are lost."""
        ...


StepT = TypeVar("StepT", bound="QueuedStep")


class QueuedStep(Protocol):
    """A step that the device is computing."""

    def collect(self) -> Sequence[SliceOutput]:
        """Wait for the outputs and return them; returns and raises what `ModelRunner.run` does."""
        ...


class PipelinedRunner(ModelRunner, Protocol[StepT]):
    """A model runner that queues steps on the device, so that Python can plan the next one meanwhile."""

    def can_follow(self, sampling: SamplingParams) -> bool:
        """Return whether a step can sample with these parameters before the token before is known."""
        ...

    def submit(self, plan: StepPlan, after: StepT | None = None) -> StepT:
        """Queue a step; steps run in the order in which they are queued.

        after: the step in flight, whose sampled tokens replace the placeholders of this step; None if
            no step is in flight.

        Raises:
            Exception: as `run` does.
        """
        ...

"""A runner that queues the steps of another one, and computes each as late as it may."""

from collections.abc import Sequence
from dataclasses import replace

from batching.inputs.sampling_params import SamplingParams
from batching.steps.model_runner import ModelRunner
from batching.steps.step_plan import UNKNOWN_TOKEN, Slice, SliceOutput, StepPlan


class QueuedPlan:
    """A step that is queued behind another one."""

    def __init__(self, runner: ModelRunner, plan: StepPlan, after: "QueuedPlan | None") -> None:
        self._runner = runner
        self._plan = plan
        self._after = after
        self._outputs: Sequence[SliceOutput] | None = None
        self._has_run = False

    def collect(self) -> Sequence[SliceOutput]:
        if self._outputs is None:
            # What it stored outlives the pool that it has lost.
            assert not self._has_run, "a step that has failed is not run again"
            slices = tuple(map(self._known, self._plan.slices))
            assert all(UNKNOWN_TOKEN not in s.token_ids for s in slices)
            if self._after is not None:
                self._after.collect()
            self._has_run = True
            self._outputs = self._runner.run(replace(self._plan, slices=slices))
            self._after = None
        return self._outputs

    def _known(self, s: Slice) -> Slice:
        if not s.expects_token:
            return s
        assert self._after is not None, "nothing samples the token"
        return replace(s, token_ids=(*s.token_ids[:-1], self._after.token_of(s.sequence_id)))

    def token_of(self, sequence_id: int) -> int:
        pairs = zip(self._plan.slices, self.collect(), strict=True)
        (token,) = [o.token_ids[0] for s, o in pairs if s.sequence_id == sequence_id]
        return token


class Pipelined:
    """Queues the steps of a runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.run = runner.run
        self.reset = runner.reset
        # How many steps were queued behind another one.
        self.num_following = 0

    def can_follow(self, sampling: SamplingParams) -> bool:
        return sampling.logprobs is None

    def submit(self, plan: StepPlan, after: QueuedPlan | None = None) -> QueuedPlan:
        self.num_following += after is not None
        return QueuedPlan(self._runner, plan, after)

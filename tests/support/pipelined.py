"""A runner that queues the steps of another one, and computes each as late as it may."""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace

from batching.request import UNKNOWN_TOKEN, BatchRequest
from batching.steps.model_runner import ModelRunner
from batching.steps.step_plan import Slice, SliceOutput, StepPlan


class QueuedPlan:
    """A step as it was when it was queued: what becomes of its requests meanwhile is not seen."""

    def __init__(self, runner: ModelRunner, plan: StepPlan, after: "QueuedPlan | None") -> None:
        self._runner = runner
        self._plan = replace(plan, slices=tuple(map(_as_queued, plan.slices)))
        self._after = after
        self._outputs: Sequence[SliceOutput] | None = None

    def collect(self) -> Sequence[SliceOutput]:
        if self._outputs is None:
            if self._after is not None:
                self._after.collect()
            for s in self._plan.slices:
                if s.request.expects_token:
                    assert self._after is not None, "nothing samples the token"
                    s.request.forget_expected()
                    s.request.token_ids.append(self._after.token_of(s.request))
            assert all(UNKNOWN_TOKEN not in s.token_ids for s in self._plan.slices)
            self._outputs = self._runner.run(self._plan)
            self._after = None
        return self._outputs

    def token_of(self, request: BatchRequest) -> int:
        pairs = zip(self._plan.slices, self.collect(), strict=True)
        (token,) = [o.token_ids[0] for s, o in pairs if s.request.request_id == request.request_id]
        return token


def _as_queued(s: Slice) -> Slice:
    return replace(s, request=_copied(s.request), forks=tuple(map(_copied, s.forks)))


def _copied(request: BatchRequest) -> BatchRequest:
    copied = copy(request)
    copied.token_ids = [*request.token_ids]
    copied.prompt_logprobs = [*request.prompt_logprobs]
    copied.block_table = deepcopy(request.block_table)
    copied.window_table = deepcopy(request.window_table)
    return copied


class Pipelined:
    """Queues the steps of a runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.run = runner.run
        self.reset = runner.reset
        # How many steps were queued behind another one.
        self.num_following = 0

    def can_follow(self, request: BatchRequest) -> bool:
        return request.sampling.logprobs is None

    def submit(self, plan: StepPlan, after: QueuedPlan | None = None) -> QueuedPlan:
        self.num_following += after is not None
        return QueuedPlan(self._runner, plan, after)

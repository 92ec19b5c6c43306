"""The engine: plan a step, run it, record it."""

import logging
from collections.abc import Callable
from time import monotonic

from batching.errors import RequestFailed
from batching.model_runner import ModelRunner
from batching.request import BatchRequest, RequestStatus
from batching.scheduler import (
    ContinuousBatchingScheduler,
    RequestFailure,
    RequestOutput,
    SchedulerStats,
)
from batching.stall_budget import StallBudget
from batching.step_plan import StepPlan

logger = logging.getLogger(__name__)


class BatchInferenceEngine:
    """Serves requests in steps; whoever owns it calls it from one thread.

    `clock` is in seconds and only ever measures how long a step took.
    """

    def __init__(
        self,
        scheduler: ContinuousBatchingScheduler,
        runner: ModelRunner,
        *,
        max_stall: float = 0.25,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._stall_budget = StallBudget(max_stall)
        self._clock = clock
        self._requests: dict[int, BatchRequest] = {}

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def add(self, *requests: BatchRequest) -> None:
        """Queue requests, some of which may be forks of others among them.

        Raises:
            RequestError: one of them can never be served; then none of them is.
        """
        for request in requests:
            self._scheduler.check(request)
        for request in requests:
            self._requests[request.request_id] = request
            if request.fork_of is None:
                self._scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """End a request before the next step; nothing happens if it has ended."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._scheduler.abort(request)

    def step(self) -> list[RequestOutput | RequestFailure]:
        """Advance every request that the plan reaches.

        A step that raises ends its own requests and loses the pool; the others start over.

        Raises:
            Exception: the pool could not be made usable again.
        """
        plan = self._scheduler.schedule(self._max_prefill_tokens())
        logger.debug("step %s", plan)
        try:
            outputs = self._run(plan)
        except Exception:
            logger.exception("a step of %d requests failed", len(plan.slices))
            return self._recover(plan)
        self._forget_ended(outputs)
        return outputs

    def _max_prefill_tokens(self) -> int | None:
        stats = self._scheduler.stats()
        num_admissible = min(
            stats.num_waiting, self._scheduler.config.max_num_seqs - stats.num_running
        )
        return self._stall_budget.max_prefill_tokens(
            stats.num_prefilling + num_admissible, stats.num_running - stats.num_prefilling
        )

    def _run(self, plan: StepPlan) -> list[RequestOutput | RequestFailure]:
        started = self._clock()
        num_decodes = sum(len(s) for s in plan.slices if s.request.status is RequestStatus.RUNNING)
        outputs = self._runner.run(plan)
        self._stall_budget.record(
            plan.num_tokens - num_decodes, num_decodes, self._clock() - started
        )
        return self._scheduler.update(plan, outputs)

    def _recover(self, plan: StepPlan) -> list[RequestOutput | RequestFailure]:
        failed = self._scheduler.discard(plan)
        self._runner.reset()
        for request in failed:
            del self._requests[request.request_id]
        return [RequestFailure(r.request_id, RequestFailed()) for r in failed]

    def _forget_ended(self, outputs: list[RequestOutput | RequestFailure]) -> None:
        for item in outputs:
            if isinstance(item, RequestFailure) or item.output.finish_reason is not None:
                del self._requests[item.request_id]

"""The engine: plan a step, run it, record it."""

import logging
from collections.abc import Callable, Container
from time import monotonic

from batching.errors import RequestFailed
from batching.observer import StepRecord
from batching.request import BatchRequest, RequestStatus
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.model_runner import ModelRunner, SlicesFailed
from batching.scheduling.outputs import RequestFailure, RequestOutput
from batching.scheduling.snapshot import EngineSnapshot
from batching.scheduling.stall_budget import StallBudget
from batching.scheduling.stats import SchedulerStats
from batching.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)


class BatchInferenceEngine:
    """Serves requests in steps; its owner calls it from one thread.

    clock: in seconds; the arrival times of requests are on the same one.
    last_step: what the latest step did.
    """

    last_step: StepRecord

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

    def snapshot(self) -> EngineSnapshot:
        """Return what there is to do, and how long it took to find out."""
        began = self._clock()
        return self._scheduler.snapshot(began).took(self._clock() - began)

    def add(self, *requests: BatchRequest) -> None:
        """Queue checked requests, some of which may be forks of others among them."""
        for request in requests:
            self._requests[request.request_id] = request
            if request.fork_of is None:
                self._scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """End a request before the next step; does nothing if it has ended."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._scheduler.abort(request)

    def step(self) -> list[RequestOutput | RequestFailure]:
        """Run one step; return the outputs of the requests that it advanced.

        A step that raises fails its own requests and loses the pool; the others start over.

        Raises:
            Exception: the pool could not be made usable again.
        """
        began = self._clock()
        plan = self._scheduler.schedule(self._max_prefill_tokens(), now=began)
        logger.debug("step %s", plan)
        has_failed = False
        try:
            outputs = self._run(plan, began)
        except SlicesFailed as failure:
            logger.exception("%d requests of a step failed", len(failure.request_ids))
            outputs = self._recover(plan, failure.request_ids)
        except Exception:
            logger.exception("a step of %d requests failed", len(plan.slices))
            has_failed = True
            outputs = self._recover(plan)
        self._forget_ended(outputs)
        ended = self._clock()
        self.last_step = StepRecord(
            ended,
            ended - began,
            plan.num_tokens,
            plan.num_prompt_tokens,
            self.stats(),
            has_failed,
            self._scheduler.block_manager.take_ages(),
        )
        return outputs

    def _max_prefill_tokens(self) -> int | None:
        stats = self._scheduler.stats()
        num_admissible = min(
            stats.num_waiting, self._scheduler.config.max_num_seqs - stats.num_running
        )
        return self._stall_budget.max_prefill_tokens(
            stats.num_prefilling + num_admissible, stats.num_running - stats.num_prefilling
        )

    def _run(self, plan: StepPlan, began: float) -> list[RequestOutput | RequestFailure]:
        num_decodes = sum(len(s) for s in plan.slices if s.request.status is RequestStatus.RUNNING)
        outputs = self._runner.run(plan)
        self._stall_budget.record(plan.num_tokens - num_decodes, num_decodes, self._clock() - began)
        return self._scheduler.update(plan, outputs)

    def _recover(
        self, plan: StepPlan, failed_ids: Container[int] | None = None
    ) -> list[RequestOutput | RequestFailure]:
        self._scheduler.discard(plan, failed_ids)
        self._runner.reset()
        # Also a request that ended in a step that raised afterwards: its output was not returned.
        ended = [r for r in self._requests.values() if r.has_ended]
        return [RequestFailure(r.request_id, RequestFailed()) for r in ended]

    def _forget_ended(self, outputs: list[RequestOutput | RequestFailure]) -> None:
        for item in outputs:
            if isinstance(item, RequestFailure) or item.output.finish_reason is not None:
                del self._requests[item.request_id]

"""Records in the requests what a step computes: before it has run as far as that is known, and after."""

from collections.abc import Sequence

from batching.config import SchedulerConfig
from batching.errors import RequestFailed
from batching.kv_cache.manager import KVCacheManager
from batching.pooling import Vector
from batching.request import BatchRequest, RequestStatus
from batching.scheduling.outputs import (
    RequestFailure,
    RequestOutput,
    append_sampled,
    embedding_output,
    note_free,
    progress_outputs,
    token_output,
)
from batching.scheduling.residents import Residents
from batching.scheduling.running import RunningRequests
from batching.steps.stats import SpecDecodeStats
from batching.steps.step_plan import Slice, SliceOutput, StepPlan
from batching.steps.token_output import FinishReason, TokenLogprobs


class StepRecorder:
    """Appends the tokens of a step to its requests, starts forks, and ends the requests that are complete.

    While a step is in flight, its requests may have a placeholder for the token that it samples.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        running: RunningRequests,
        residents: Residents,
    ) -> None:
        self.spec_decode = SpecDecodeStats()
        self._config = config
        self._kv = kv
        self._running = running
        self._residents = residents
        self._expected: StepPlan | None = None

    @property
    def expects_step(self) -> bool:
        """True if a step in flight is recorded already, with placeholders."""
        return self._expected is not None

    def expect(self, plan: StepPlan) -> None:
        """Record a step in flight, with a placeholder for each token that it samples."""
        self._expected = plan
        for s in plan.slices:
            request = self._residents.get(s.sequence_id)
            if request is None:
                continue
            self._kv.commit(request, s, s.stop)
            if s.num_samples:
                _begin_decoding(request)
                request.expect_token()

    def forget_expected(self) -> StepPlan | None:
        """Remove the placeholders of the step in flight; return its plan, or None if there is none."""
        expected, self._expected = self._expected, None
        for s in () if expected is None else expected.slices:
            if (request := self._residents.get(s.sequence_id)) is not None:
                request.forget_expected()
        return expected

    def record(
        self, plan: StepPlan, outputs: Sequence[SliceOutput]
    ) -> list[RequestOutput | RequestFailure]:
        """Record the outputs of a step; return an output for each request that advanced."""
        items: list[RequestOutput | RequestFailure] = []
        is_committed = self.forget_expected() is plan
        for s, output in zip(plan.slices, outputs, strict=True):
            request = self._residents.get(s.sequence_id)
            if request is None:
                # It has ended while the step was in flight.
                continue
            request.prompt_logprobs += output.prompt_logprobs
            if s.num_samples:
                items += self._sampled(request, s, output, is_committed=is_committed)
                continue
            if not is_committed:
                self._kv.commit(request, s, s.stop)
            if output.vector is not None:
                items.append(self._end_pooled(request, output.vector))
            else:
                items += progress_outputs(request)
        return items

    def _sampled(
        self, request: BatchRequest, s: Slice, output: SliceOutput, *, is_committed: bool
    ) -> list[RequestOutput | RequestFailure]:
        """Record the sampled tokens of a slice, for its request and for its forks."""
        if not s.forks:
            return [self._append(request, s, output, is_committed=is_committed)]
        # The forks come first: they share the blocks that the request releases when it ends.
        forks = [
            self._start_fork(request, fork, s, i, output)
            for i, fork_id in enumerate(s.forks)
            if (fork := self._residents.get(fork_id)) is not None
        ]
        return [self._append(request, s, output, is_committed=is_committed), *forks]

    def _append(
        self, request: BatchRequest, s: Slice, output: SliceOutput, *, is_committed: bool
    ) -> RequestOutput | RequestFailure:
        """Append the sampled tokens to a request, up to the first draft that was wrong."""
        token_ids = append_sampled(request, s, output)
        if s.num_drafts:
            num_accepted = len(token_ids) - 1
            request.drafter.record(request.num_tokens, s.num_drafts, num_accepted)
            self.spec_decode.record(s.num_drafts, num_accepted)
        if not is_committed:
            # The last token is the one that the model has not processed yet.
            self._kv.commit(request, s, request.num_tokens - 1)
            _begin_decoding(request)
        logprobs = output.logprobs[: len(token_ids)]
        return self._make_output(request, token_ids, logprobs, output)

    def _start_fork(
        self, request: BatchRequest, fork: BatchRequest, s: Slice, index: int, output: SliceOutput
    ) -> RequestOutput | RequestFailure:
        """Start another choice on the shared blocks of the prompt, with its first token."""
        position = s.num_samples + index
        fork.fork_of = None
        request.forks.remove(fork)
        self._kv.fork(request, fork, s.stop)
        fork.scheduled_time = request.scheduled_time
        fork.admitted_time = request.admitted_time
        fork.move_to(RequestStatus.PREFILLING)
        fork.move_to(RequestStatus.RUNNING)
        self._running.join(fork)
        token_id = output.token_ids[position]
        note_free(fork, output)
        fork.append(token_id, is_complete=fork.request_id in output.completed)
        logprobs = output.logprobs[position : position + 1]
        made = self._make_output(fork, (token_id,), logprobs, output)
        if fork.status is RequestStatus.RUNNING:
            if len(self._running.requests) > self._config.max_num_seqs:
                self._running.requeue(fork)
            elif self._kv.states is not None:
                self._kv.states.fork(request, fork, s.stop)
        return made

    def _make_output(
        self,
        request: BatchRequest,
        token_ids: tuple[int, ...],
        logprobs: Sequence[TokenLogprobs],
        output: SliceOutput,
    ) -> RequestOutput | RequestFailure:
        """Return the output for new tokens; a request that ends with them leaves the batch."""
        if output.errors and (error := dict(output.errors).get(request.request_id)) is not None:
            self._running.leave(request, RequestStatus.CANCELLED)
            return RequestFailure(request.request_id, RequestFailed(error))
        if request.finish_reason is not None:
            self._running.leave(request, RequestStatus.COMPLETED)
        return RequestOutput(request.request_id, token_output(request, token_ids, logprobs))

    def _end_pooled(self, request: BatchRequest, vector: Vector) -> RequestOutput:
        """End a request with pooling and return its vector."""
        request.finish_reason = FinishReason.STOP
        request.move_to(RequestStatus.RUNNING)
        self._running.leave(request, RequestStatus.COMPLETED)
        return embedding_output(request, vector)


def _begin_decoding(request: BatchRequest) -> None:
    if request.status is RequestStatus.PREFILLING:
        request.move_to(RequestStatus.RUNNING)

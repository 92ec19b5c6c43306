"""Work without text: all prompts are read, a few at a time, and nothing of it stays when it fails."""

import asyncio
from collections.abc import Sequence

import pytest

from app.admission.admitted_request import AdmittedRequest, Deadline
from app.generation.prompt_task import PromptJob, PromptTask
from app.http.client import ANONYMOUS
from app.observability.request_record import RequestRecord
from batching import DeadlineExceeded, PoolingParams, Priority, RequestFailed, SamplingParams
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.fakes import expected_vector
from tests.support.requests import specs
from tests.support.speaker import Served, Speaker, served

pytestmark = pytest.mark.anyio

PROMPTS = [[i, 7, i] for i in range(30)]


class Gated(Speaker):
    """Does not read before the gate is open."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        self._gate.wait()
        return super().run(plan)


class Failing(Speaker):
    """Fails at a prompt with a certain token."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        if any(17 in s.token_ids for s in plan.slices):
            raise RuntimeError("out of memory")
        return super().run(plan)


class Begun:
    """A task over all prompts, four in a group, and the records of requests that have ended."""

    def __init__(self, server: Served, time_limit: float | None = None) -> None:
        admission = server.service.admission
        self.records: list[RequestRecord] = []
        request = AdmittedRequest(
            ticket=admission.admit(ANONYMOUS, Priority.NORMAL),
            deadline=Deadline(admission.clock(), time_limit, admission.clock),
            on_finish=self.records.append,
        )
        job = PromptJob(
            completion_id="embd-1",
            model_id="fake",
            specs=specs(PROMPTS, max_tokens=0, pooling=PoolingParams()),
            group_size=4,
        )
        request.ticket.reserve_tokens(job.num_prompt_tokens)
        self.task = PromptTask(server.engine, job, request)

    async def check_ended(self, server: Served, outcome: str) -> None:
        """Fail unless nothing of the request is left."""
        self.task.close()
        assert [record.outcome for record in self.records] == [outcome]
        admission = server.service.admission
        assert (admission.num_requests, admission.num_waiting_tokens) == (0, 0)
        assert await server.num_unfinished() == 0


async def test_each_prompt_has_its_output() -> None:
    async with served() as server:
        begun = Begun(server)
        assert server.service.admission.num_waiting_tokens == 90
        outputs = await begun.task.collect()
        assert server.service.admission.num_waiting_tokens == 0
        await begun.check_ended(server, "stop")
    assert [list(output.embedding or ()) for output in outputs] == [
        expected_vector(prompt, PoolingParams()) for prompt in PROMPTS
    ]
    (record,) = begun.records
    assert len(record.sequences) == 30
    assert record.usage.num_prompt_tokens == 90


async def test_a_later_request_does_not_wait_for_all_prompts() -> None:
    order: list[Sequence[int]] = []

    class Watching(Gated):
        def run(self, plan: StepPlan) -> list[SliceOutput]:
            outputs = super().run(plan)
            order.extend(s.token_ids for s in plan.slices)
            return outputs

    async with served(runner=Watching, is_gated=True) as server:
        begun = Begun(server)
        collected = asyncio.create_task(begun.task.collect())
        await asyncio.to_thread(server.gate.reached.wait)
        later = asyncio.create_task(
            server.engine.submit(
                specs([[99]], sampling=SamplingParams(), max_tokens=0, pooling=PoolingParams())
            )
        )
        await asyncio.sleep(0)  # it is queued, and waits for the engine
        server.gate.open()
        async for _ in await later:
            pass
        await collected
        begun.task.close()
    assert [*map(list, order)].index([99]) < 20


async def test_when_a_step_fails_the_others_are_aborted() -> None:
    async with served(runner=Failing) as server:
        begun = Begun(server)
        with pytest.raises(RequestFailed):
            await begun.task.collect()
        await begun.check_ended(server, "failed")


async def test_no_prompt_is_read_after_the_deadline() -> None:
    async with served() as server:
        begun = Begun(server, time_limit=1e-9)
        with pytest.raises(DeadlineExceeded):
            await begun.task.collect()
        await begun.check_ended(server, "timeout")


async def test_a_cancelled_request_leaves_the_engine() -> None:
    async with served(runner=Gated, is_gated=True) as server:
        begun = Begun(server)
        collected = asyncio.create_task(begun.task.collect())
        await asyncio.to_thread(server.gate.reached.wait)
        collected.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collected
        await begun.check_ended(server, "aborted")

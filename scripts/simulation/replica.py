"""A replica: the real engine and scheduler, with a clock where the model would be."""

from collections.abc import Generator, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

from simpy import Environment, Event

from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.inputs.sequence_spec import SequenceSpec
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.outputs import RequestOutput
from batching.steps.step_plan import SliceOutput, StepPlan
from scripts.simulation.costs import StepCosts
from scripts.simulation.records import Served

Process = Generator[Event, Any, None]

# Which token it is matters only where two prompts agree up to there.
OUTPUT_TOKEN: Final = 0
# As on the platforms that MLX serves.
_MIN_COPIED_TOKENS: Final = 4


def config_of(num_blocks: int) -> SchedulerConfig:
    """Return the server's own limits, with a pool of so many blocks and no drafts."""
    return SchedulerConfig(num_blocks=num_blocks, min_copied_tokens=_MIN_COPIED_TOKENS)


class SteppedClock:
    """A model runner that computes nothing: each step moves its clock by what the step would take.

    now: in seconds.
    num_computed: prompt tokens that it was given, those of preempted requests again.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.now = 0.0
        self.num_computed = 0

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        self.now += self._costs.of(plan)
        self.num_computed += plan.num_prompt_tokens
        return [SliceOutput((OUTPUT_TOKEN,) * s.num_samples) for s in plan.slices]

    def reset(self) -> None:
        """There is no pool."""


class Answer(NamedTuple):
    """A request at a replica; `ended` is triggered when its last token is there."""

    served: Served
    ended: Event


class Replica:
    """One server; its process runs as long as the simulation."""

    def __init__(self, env: Environment, config: SchedulerConfig, costs: StepCosts) -> None:
        self._env = env
        self._runner = SteppedClock(costs)
        self._engine = BatchInferenceEngine(
            ContinuousBatchingScheduler(config), self._runner, clock=lambda: self._runner.now
        )
        self._answers: dict[int, Answer] = {}
        self._arrived: list[BatchRequest] = []
        self._wake = env.event()
        self._ids = count()
        env.process(self._serve())

    @property
    def num_computed(self) -> int:
        """The prompt tokens that it has computed."""
        return self._runner.num_computed

    @property
    def num_preemptions(self) -> int:
        return self._engine.stats().num_preemptions

    def submit(self, prompt: tuple[int, ...], max_tokens: int, served: Served) -> Event:
        """Take a request; return what is triggered at its end. `served` gets its times and counts."""
        request_id = next(self._ids)
        spec = SequenceSpec(prompt=prompt, max_tokens=max_tokens)
        self._arrived.append(BatchRequest(request_id, spec, arrival_time=self._env.now, seed=0))
        self._answers[request_id] = answer = Answer(served, self._env.event())
        if not self._wake.triggered:
            self._wake.succeed()
        return answer.ended

    def _serve(self) -> Process:
        while True:
            if not (self._arrived or self._engine.has_work):
                yield self._wake
            self._wake = self._env.event()
            # Between two steps, as the server's thread does.
            self._engine.add(*self._arrived)
            self._arrived.clear()
            self._runner.now = self._env.now
            outputs = self._engine.step()
            yield self._env.timeout(self._runner.now - self._env.now)
            for each in outputs:
                assert isinstance(each, RequestOutput)
                self._record(each)

    def _record(self, each: RequestOutput) -> None:
        answer, output = self._answers[each.request_id], each.output
        served = answer.served
        if not served.num_output:
            served.first = self._env.now
            served.num_cached = output.num_cached_tokens
        served.num_output += len(output.token_ids)
        if output.finish_reason is not None:
            served.ended = self._env.now
            del self._answers[each.request_id]
            answer.ended.succeed()

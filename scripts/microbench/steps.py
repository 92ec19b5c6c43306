"""How long a step of the real engine takes, by rows and by context."""

import random
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

from batching.backend.builder.engine import build_engine
from batching.backend.runner.executor import Executor
from batching.config import BLOCK_SIZE, EngineConfig
from batching.inputs.sequence_spec import SequenceSpec
from batching.request import BatchRequest
from scripts.microbench.pure import NUM_PROMPT_TOKENS, time_prompts
from scripts.microbench.timing import QUICK, Pace, Result, Timing

_NUM_STEPS, _NUM_WARM_UP_STEPS = 20, 3
# One comes from the prompt, and the last step must not end the request.
_MAX_TOKENS: Final = 1 + _NUM_WARM_UP_STEPS + _NUM_STEPS + 1
_PREFILL_CHUNK: Final = 256


class Point(NamedTuple):
    rows: int
    context: int


_QUICK: Final = [Point(1, 128), Point(2, 128)]
_BY_ROWS: Final = [Point(rows, 128) for rows in (1, 2, 4, 8, 16, 32)]
_BY_CONTEXT: Final = [Point(rows, c) for rows in (1, 8) for c in (512, 1024, 2048, 4096)]


class StepTime(NamedTuple):
    """Seconds of a step; `outside` are those that go before and after the model."""

    whole: float
    outside: float


def run_steps(model: str, pace: Pace) -> Result:
    """Time decode steps and one prefill; raise ModelLoadError if the model cannot be batched."""
    # In this order, a prompt is the beginning of the next one with as many rows.
    points = _QUICK if pace == QUICK else sorted(_BY_ROWS + _BY_CONTEXT)
    bench = StepBench(model, points)
    timings: list[Timing] = []
    shares: dict[str, float] = {}
    for point in bench.within_context(points):
        steps = bench.decodes(point)
        name = f"{point.rows} rows, context {point.context}"
        timings.append(Timing.of(name, [s.whole for s in steps], **point._asdict()))
        if point in _BY_ROWS:
            share = 100 * median(s.outside / s.whole for s in steps)
            shares[f"scheduler and step inputs, of {name}"] = share
    prefill, warm = bench.prefill(), bench.prefill()
    off, on = time_prompts(pace)
    of = f"of {prefill:.2f} s to read {NUM_PROMPT_TOKENS:,} new tokens"
    shares[f"prefix cache, {of}"] = 100 * (on.seconds - off.seconds) / prefill
    shares[f"the same prompt once more, {of}"] = 100 * warm / prefill
    return Result(timings, shares)


class StepBench:
    """An engine, and the requests that it is measured with.

    No two rows share a block; the prefix cache saves reading a shorter prompt again.
    """

    def __init__(self, model: str, points: list[Point]) -> None:
        max_rows = max(point.rows for point in points)
        max_tokens = max(rows * (context + 2 * BLOCK_SIZE) for rows, context in points)
        config = EngineConfig(
            model=model,
            model_id=model,
            max_num_seqs=max_rows,
            # Half as much again, so that a growing table finds the next block empty.
            num_blocks=3 * max(max_tokens, 2 * NUM_PROMPT_TOKENS) // (2 * BLOCK_SIZE),
            # Prompts of one length are read in the same steps, and none beside a decode.
            max_num_batched_tokens=max_rows * _PREFILL_CHUNK,
            prefill_chunk=_PREFILL_CHUNK,
            max_draft_tokens=0,
        )
        loaded = build_engine(config)
        # The parts of the engine's step, which it keeps to itself.
        self._scheduler, executor = loaded.engine._scheduler, loaded.engine._runner
        assert isinstance(executor, Executor)
        self._runner = executor.runner
        self._model = loaded.model

    def within_context(self, points: list[Point]) -> list[Point]:
        return [p for p in points if p.context + _MAX_TOKENS <= self._model.max_model_len]

    def decodes(self, point: Point) -> list[StepTime]:
        requests = self._start(point)
        steps = [self._step() for _ in range(_NUM_WARM_UP_STEPS + _NUM_STEPS)]
        for request in requests:
            self._scheduler.abort(request)
        return steps[_NUM_WARM_UP_STEPS:]

    def prefill(self) -> float:
        """Return how many seconds a prompt takes, of which nothing is known the first time."""
        started = perf_counter()
        (request,) = self._start(Point(1, NUM_PROMPT_TOKENS), seed=1)
        duration = perf_counter() - started
        self._scheduler.abort(request)
        return duration

    def _start(self, point: Point, seed: int = 0) -> list[BatchRequest]:
        """Let the prompts be read, so that what follows are decodes."""
        requests: list[BatchRequest] = []
        for row in range(point.rows):
            rng = random.Random(f"{seed} {point.rows} {row}")
            prompt = rng.choices(range(self._model.vocab_size), k=point.context)
            requests.append(
                BatchRequest(row, SequenceSpec(prompt=tuple(prompt), max_tokens=_MAX_TOKENS))
            )
            self._scheduler.add(requests[-1])
        while not all(request.num_output_tokens for request in requests):
            self._step()
        return requests

    def _step(self) -> StepTime:
        started = perf_counter()
        plan = self._scheduler.schedule()
        planned = perf_counter()
        # The runner does this once more, as a part of the whole.
        self._runner.cache.begin(plan.slices)
        begun = perf_counter()
        sampled = self._runner.run(plan)
        ran = perf_counter()
        self._scheduler.update(plan, sampled)
        ended = perf_counter()
        whole = ended - started - (begun - planned)
        return StepTime(whole, begun - started + ended - ran)

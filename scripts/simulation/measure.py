"""Times steps of the real engine, and fits the coefficients of the model of costs.

`taskset -c 0 python -m scripts.simulation.measure > costs.json` on a quiet machine, in a minute: a replica of the benchmark
has one core for all its threads, too.  The simulation takes it with `--costs`, or from scripts/simulation/costs.json.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from batching.backend.builder.engine import build_engine
from batching.batch_inference import BatchInferenceEngine
from batching.config import EngineConfig
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_files.references import BUNDLED_MODEL
from batching.request import BatchRequest
from scripts.machine import describe
from scripts.simulation.costs import StepCosts, Timed, Work, errors

_ROWS: Final = (1, 2, 4, 8)
_CONTEXTS: Final = (64, 512, 1536)
_NUM_STEPS: Final = 15
_PROMPT_TOKENS: Final = 1536
_NUM_PROMPTS: Final = 4
_NUM_BLOCKS: Final = 640


class Engine:
    """An engine whose steps are timed; no two of its requests share a block."""

    def __init__(self, model: str, threads: int) -> None:
        config = EngineConfig(
            model=model,
            model_id=model,
            num_blocks=_NUM_BLOCKS,
            cpu_threads=threads,
            max_draft_tokens=0,
            # Chunks of the same size each time.
            max_urgent_wait_ms=None,
        )
        loaded = build_engine(config)
        self._engine: BatchInferenceEngine = loaded.engine
        self._vocab_size = loaded.model.vocab_size
        self._rng = random.Random(0)
        self._num_requests = 0

    def prompt(self) -> Iterator[Timed]:
        """Yield the steps of a long prompt."""
        self._add(self._prompt(_PROMPT_TOKENS), 1)
        start = 0
        while self._engine.has_work:
            self._engine.step()
            step = self._engine.last_step
            if size := step.num_prompt_tokens:
                yield Timed(Work(1, size, size * (start + size / 2), 0, 0), step.duration)
            start += size

    def decodes(self, rows: int, context: int) -> Timed:
        """Return the fastest step of requests that decode behind a context of so many tokens."""
        prompts = [self._prompt(context) for _ in range(rows)]
        # Read before, so that all begin to decode at once.
        for prompt in prompts:
            self._add(prompt, 1)
        while self._engine.has_work:
            self._engine.step()
        ids = [self._add(prompt, 2 * _NUM_STEPS) for prompt in prompts]
        seconds: list[float] = []
        while len(seconds) < _NUM_STEPS:
            self._engine.step()
            step = self._engine.last_step
            if step.num_prompt_tokens == 0 and step.num_tokens == rows:
                seconds.append(step.duration)
        for each in ids:
            self._engine.abort(each)
        self._engine.drain()
        work = Work(1, 0, 0, rows, rows * (context + _NUM_STEPS / 2))
        return Timed(work, min(seconds))

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(self._vocab_size), k=num_tokens))

    def _add(self, prompt: tuple[int, ...], max_tokens: int) -> int:
        self._num_requests += 1
        spec = SequenceSpec(prompt=prompt, max_tokens=max_tokens)
        self._engine.add(BatchRequest(self._num_requests, spec, seed=0))
        return self._num_requests


def fit(timed: Sequence[Timed]) -> StepCosts:
    """Return the coefficients, none below 0, with the least squares of the relative errors."""
    seconds = np.array([each.seconds for each in timed])
    work = np.array([each.work for each in timed]) / seconds[:, None]
    scale = work.max(axis=0)
    left = list(range(len(Work._fields)))
    while True:
        # A term that would be negative has no effect that these steps show.
        found = np.linalg.lstsq(work[:, left] / scale[left], np.ones(len(timed)), rcond=None)[0]
        if found.min() >= 0:
            break
        del left[int(found.argmin())]
    coefficients = np.zeros(len(Work._fields))
    coefficients[left] = found / scale[left]
    return StepCosts(Work(*coefficients.tolist()))


def measure(model: str, threads: int) -> dict[str, Any]:
    """Return the coefficients, how well they fit, and the machine.

    Of steps that do the same the fastest counts: whatever else runs on the machine makes them slower.
    """
    engine = Engine(model, threads)
    repeats = zip(*[[*engine.prompt()] for _ in range(_NUM_PROMPTS)], strict=True)
    timed = [min(steps, key=lambda step: step.seconds) for steps in repeats]
    timed += [engine.decodes(rows, context) for context in _CONTEXTS for rows in _ROWS]
    costs = fit(timed)
    return {
        "machine": describe(),
        "model": model,
        "threads": threads,
        "median_error": round(median(map(abs, errors(costs, timed))), 3),
        "seconds": {name: float(f"{s:.4g}") for name, s in costs.seconds._asdict().items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.simulation.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU kernels")
    args = parser.parse_args(argv)
    print(json.dumps(measure(args.model, args.threads), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

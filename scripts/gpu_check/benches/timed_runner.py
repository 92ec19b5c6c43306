"""Runners between an engine and the real one: one that computes nothing, one that looks at the clock."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from batching.backend.runner.mlx_runner import MLXRunner, MLXStep
from batching.steps.step_plan import SliceOutput, StepPlan


class NoRunner:
    """Samples token 0 at once; keys and values stay as the pool has them."""

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        return [SliceOutput((0,) * s.num_samples) for s in plan.slices]

    def reset(self) -> None:
        raise AssertionError("nothing fails here")


@dataclass
class TimedStep:
    """A step whose `collect` adds to the time of its runner."""

    runner: "TimedRunner"
    step: MLXStep

    def collect(self) -> Sequence[SliceOutput]:
        began = perf_counter()
        try:
            return self.step.collect()
        finally:
            self.runner.waited += perf_counter() - began


class TimedRunner:
    """Counts the seconds in which Python waits for the device."""

    def __init__(self, runner: MLXRunner) -> None:
        self._runner = runner
        self.can_follow = runner.can_follow
        self.reset = runner.reset
        self.waited = 0.0

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        return self.submit(plan).collect()

    def submit(self, plan: StepPlan, after: TimedStep | None = None) -> TimedStep:
        step = self._runner.submit(plan, None if after is None else after.step)
        return TimedStep(self, step)


class Launches:
    """Counts the primitives of the graphs that are evaluated while it is entered; some only change shapes."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Launches":
        evaluate: Callable[..., None] = mx.async_eval

        def counted(*arrays: Any) -> None:
            self.count += _num_primitives(arrays)
            evaluate(*arrays)

        self._patch = patch.object(mx, "async_eval", counted)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


_SHAPES_ONLY = frozenset(
    {
        "Reshape",
        "Transpose",
        "Broadcast",
        "ExpandDims",
        "Squeeze",
        "Flatten",
        "Unflatten",
        "Split",
        "Slice",
        "AsStrided",
    }
)


def _num_primitives(arrays: Sequence[Any]) -> int:
    flat = [a for each in arrays for a in (each if isinstance(each, list) else [each])]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *flat)
        kinds = re.findall(r'label ?="(\w+)", shape=rectangle', path.read_text(encoding="utf-8"))
    return sum(kind not in _SHAPES_ONLY for kind in kinds)

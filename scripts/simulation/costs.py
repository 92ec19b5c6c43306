"""How long a step takes: a linear model, whose coefficients `python -m scripts.simulation.measure` finds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from batching.steps.step_plan import StepPlan

COSTS: Final = Path(__file__).with_name("costs.json")


class Work(NamedTuple):
    """What a step does; the fields are the model's terms.

    step: 1.
    prefill: prompt tokens.
    attended: of each prompt token the tokens before it, all together.
    rows: requests that decode.
    context: tokens before those of all of them.
    """

    step: float
    prefill: float
    attended: float
    rows: float
    context: float

    @classmethod
    def of(cls, plan: StepPlan) -> "Work":
        """Return what the slices of a plan are."""
        prefills = [s for s in plan.slices if s.is_prefill]
        decodes = [s for s in plan.slices if not s.is_prefill]
        return cls(
            1,
            sum(map(len, prefills)),
            sum(len(s) * (s.start + len(s) / 2) for s in prefills),
            sum(map(len, decodes)),
            sum(s.start for s in decodes),
        )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds for each unit of `Work`."""

    seconds: Work

    def of(self, plan: StepPlan) -> float:
        return sum(a * b for a, b in zip(self.seconds, Work.of(plan), strict=True))

    @classmethod
    def load(cls, path: Path = COSTS) -> "StepCosts":
        """Read the coefficients from what `scripts.simulation.measure` has printed."""
        found: Mapping[str, float] = json.loads(path.read_text(encoding="utf-8"))["seconds"]
        return cls(Work(**found))


class Timed(NamedTuple):
    """The seconds that some work took."""

    work: Work
    seconds: float


def errors(costs: StepCosts, timed: Sequence[Timed]) -> list[float]:
    """Return by which part of the measured time the model is wrong, for each point."""
    return [
        sum(a * b for a, b in zip(costs.seconds, each.work, strict=True)) / each.seconds - 1
        for each in timed
    ]

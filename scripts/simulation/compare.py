"""Simulates what `python -m scripts.bench.replicas` has measured, and says how far apart they are."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from scripts.simulation.costs import StepCosts
from scripts.simulation.records import summarise
from scripts.simulation.report import table
from scripts.simulation.simulate import Setup, simulate

Load = tuple[str, str, int]
Run = tuple[Setup, Mapping[str, float]]

HEAD: Final = ("trace", "policy", "replicas", "figure", "measured", "simulated", "ratio")
# With their digits.
_FIGURES: Final = {
    "output_per_second": ("output tokens/s", 1),
    "first_p50": ("first token p50, s", 3),
    "first_p99": ("first token p99, s", 3),
    "num_prompt": ("prompt tokens", 0),
    "num_computed": ("computed", 0),
}


def read_runs(path: Path) -> list[Run]:
    """Return what was run, and its figures: some fields of `Summary`, those that were measured.

    Raises:
        OSError, ValueError, LookupError, TypeError: there is no such file, or it is another one.
    """
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return [(Setup(**run["setup"]), run["summary"]) for run in runs]


def compare(runs: Sequence[Run], costs: StepCosts) -> str:
    """Return a table of the figures of each load, measured and simulated; of several rounds the medians."""
    loads = dict.fromkeys((s.trace, s.policy, s.num_replicas) for s, _ in runs)
    return table(HEAD, [row for load in loads for row in _rows(load, runs, costs)])


def _rows(load: Load, runs: Sequence[Run], costs: StepCosts) -> Iterator[Sequence[str]]:
    of_load = [(s, found) for s, found in runs if (s.trace, s.policy, s.num_replicas) == load]
    simulated = [summarise(simulate(setup, costs).served) for setup, _ in of_load]
    for name, (title, digits) in _FIGURES.items():
        known = [found[name] for _, found in of_load if name in found]
        if not known:
            continue
        measured, expected = median(known), median(getattr(each, name) for each in simulated)
        yield (
            *map(str, load),
            title,
            f"{measured:,.{digits}f}",
            f"{expected:,.{digits}f}",
            f"{expected / measured:.2f}" if measured else "-",
        )

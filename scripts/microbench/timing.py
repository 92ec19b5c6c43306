"""Repeats a call, and says how long it took."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

# Seconds that a case may take in one round, so that a slow one does not hold up the others.
_MAX_ROUND: Final = 0.5
# Seconds that a sample takes at least, by calling again, so that the clock does not count.
_MIN_SAMPLE: Final = 50e-6


class Pace(NamedTuple):
    """A case is timed `num_samples` times in a row, in each of `num_rounds` turns."""

    num_rounds: int
    num_samples: int


FULL: Final = Pace(5, 15)
QUICK: Final = Pace(1, 3)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a call, as the median and the tenths.

    labels: name it to a program.  note: says to a person what the median means.
    """

    name: str
    seconds: float
    p10: float
    p90: float
    labels: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of(cls, name: str, samples: Sequence[float], **labels: int) -> "Timing":
        median, p10, p90 = np.percentile(samples, (50, 10, 90), method="inverted_cdf").tolist()
        return cls(name, median, p10, p90, labels)

    def in_words(self) -> list[str]:
        times = [in_words(seconds) for seconds in (self.seconds, self.p10, self.p90)]
        return [*times, f"   {self.note}"] if self.note else times

    def as_json(self) -> dict[str, str | float]:
        times = {"seconds": self.seconds, "p10": self.p10, "p90": self.p90}
        return {"name": self.name, **self.labels, **times}


class Result(NamedTuple):
    """What a benchmark found; `shares` are percentages."""

    timings: list[Timing]
    shares: Mapping[str, float] = {}

    def __str__(self) -> str:
        width = max(map(len, [*(t.name for t in self.timings), *self.shares]))
        rows = [("", ["median", "p10", "p90"])]
        rows += [(t.name, t.in_words()) for t in self.timings]
        rows += [(name, [f"{share:.2g} %"]) for name, share in self.shares.items()]
        return "\n".join(
            f"  {name:<{width}}" + "".join(f"{cell:>12}" for cell in cells) for name, cells in rows
        )


def in_words(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} µs"


def compare(cases: Mapping[str, Callable[[], object]], pace: Pace) -> list[Timing]:
    """Time the cases in turns, so that a machine that changes its pace changes it for all."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(pace.num_rounds):
        for name, func in cases.items():
            samples[name] += _round(func, pace.num_samples)
    return [Timing.of(name, times) for name, times in samples.items()]


def _round(func: Callable[[], object], num_samples: int) -> list[float]:
    # The first call finds the caches and the threads as the case before it left them.
    num_calls = 1 + int(_MIN_SAMPLE / _sample(func, 1))
    samples: list[float] = []
    while len(samples) < num_samples and sum(samples) * num_calls < _MAX_ROUND:
        samples.append(_sample(func, num_calls))
    return samples


def _sample(func: Callable[[], object], num_calls: int) -> float:
    started = perf_counter()
    for _ in range(num_calls):
        func()
    return (perf_counter() - started) / num_calls

"""Whether a quantity grows with time: a line through its samples."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple


class Trend(NamedTuple):
    """A slope by least squares, and its standard error, which takes the samples as independent."""

    slope: float
    standard_error: float

    def times(self, factor: float) -> "Trend":
        """Return it in other units."""
        return Trend(self.slope * factor, self.standard_error * factor)


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Return the slope of values over times, of which there are three at least."""
    assert len(times) == len(values) >= 3, "two points are always on a line"
    mean_time, mean_value = fmean(times), fmean(values)
    spread = sum((t - mean_time) ** 2 for t in times)
    slope = (
        sum((t - mean_time) * (v - mean_value) for t, v in zip(times, values, strict=True)) / spread
    )
    residuals = (
        v - mean_value - slope * (t - mean_time) for t, v in zip(times, values, strict=True)
    )
    variance = sum(r * r for r in residuals) / (len(times) - 2)
    return Trend(slope, math.sqrt(variance / spread))

"""Whether a quantity grows with time: a line through its samples."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Trend(NamedTuple):
    """A slope by least squares, and its standard error, which takes the samples as independent."""

    slope: float
    standard_error: float

    def times(self, factor: float) -> "Trend":
        """Return it in other units."""
        return Trend(self.slope * factor, self.standard_error * factor)


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Return the slope of values over times, of which there are three at least."""
    (slope, _), covariance = np.polyfit(times, values, 1, cov=True)
    return Trend(float(slope), math.sqrt(covariance[0][0]))

"""What a run reports: values and trends, their bounds, and the table of both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table; without a bound it is for information."""

    name: str
    value: str
    bound: str = ""
    is_met: bool = True


def at_most(name: str, value: float, bound: float, unit: str, digits: int = 0) -> Check:
    shown, limit = f"{value:.{digits}f} {unit}", f"at most {bound:g} {unit}"
    return Check(name, shown.strip(), limit.strip(), value <= bound)


def none_of(name: str, faults: Sequence[str]) -> Check:
    """Demand that there are no faults, and show the first one."""
    value = f"{len(faults)}: {faults[0]}" if faults else "0"
    return Check(name, value, "0", not faults)


def equal(name: str, value: object, wanted: object) -> Check:
    return Check(name, str(value), str(wanted), value == wanted)


def lines(checks: Sequence[Check]) -> list[str]:
    """Return the table, with a mark at each bound that is missed."""
    width = max(len(check.name) for check in checks)
    return [f"  {check.name:<{width}}  {_cell(check)}" for check in checks]


def _cell(check: Check) -> str:
    bound = f"  [{check.bound}]" if check.bound else ""
    return f"{check.value}{bound}{'' if check.is_met else '  MISSED'}"


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

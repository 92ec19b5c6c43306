"""The definition of percentiles that every figure here uses."""

from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least `percent` % of the sorted values do not exceed.

    This is the nearest-rank method: always a value that was measured, never one between two.
    """
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

"""What became of the requests of a run, simulated or measured, and the figures of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

# Of the requests: clients that have ended leave the last ones to themselves.
_FULL: Final = 0.9


@dataclass(slots=True, kw_only=True)
class Served:
    """One request; times are in seconds.

    sent: when the client first sent it.
    first, ended: when its first and its last token came.
    num_rejections: how often it got a 429 before.
    """

    sent: float
    first: float = 0.0
    ended: float = 0.0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_rejections: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run.

    requests_per_second, output_per_second: until nine tenths of the requests had ended.
    first_p50, first_p99: seconds to the first token.
    num_computed: prompt tokens that were not in the prefix cache.
    """

    num_requests: int
    requests_per_second: float
    output_per_second: float
    first_p50: float
    first_p99: float
    num_prompt: int
    num_computed: int
    num_rejections: int

    @property
    def computed(self) -> float:
        """The share of the prompt tokens that was computed."""
        return self.num_computed / self.num_prompt


def summarise(served: Sequence[Served]) -> Summary:
    """Return the figures of at least one request."""
    in_time = sorted(served, key=lambda each: each.ended)[: max(1, int(_FULL * len(served)))]
    seconds = in_time[-1].ended - min(each.sent for each in served)
    firsts = [each.first - each.sent for each in served]
    p50, p99 = np.percentile(firsts, (50, 99), method="inverted_cdf")
    return Summary(
        num_requests=len(served),
        requests_per_second=len(in_time) / seconds,
        output_per_second=sum(each.num_output for each in in_time) / seconds,
        first_p50=float(p50),
        first_p99=float(p99),
        num_prompt=sum(each.num_prompt for each in served),
        num_computed=sum(each.num_prompt - each.num_cached for each in served),
        num_rejections=sum(each.num_rejections for each in served),
    )

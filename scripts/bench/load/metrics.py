"""From records to numbers, by the formulas of vLLM's serving benchmark.

TPOT is (E2E - TTFT) / (output tokens - 1) of each request; ITL are the gaps between the chunks
with text, of all requests together; failed requests count in no latency and no throughput.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from scripts.bench.load.client import RequestRecord

Values = Mapping[str, float]

PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one run, or the medians of several; `values` lacks what is not known."""

    num_requests: int
    num_failed: int
    first_error: str | None
    values: Values


def summarise(records: Sequence[RequestRecord]) -> Summary:
    """Sum up a run."""
    good = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    return Summary(
        num_requests=len(records),
        num_failed=len(errors),
        first_error=next(iter(errors), None),
        values=_values(good, _duration(records)),
    )


def latencies(records: Iterable[RequestRecord]) -> dict[str, float]:
    """Return the percentiles of all latencies that the requests have, in milliseconds."""
    records = list(records)
    samples = {
        "ttft": [r.ttft for r in records if r.ttft is not None],
        "tpot": [r.tpot for r in records if r.tpot is not None],
        "itl": [gap for r in records for gap in r.gaps],
        "e2e": [r.e2e for r in records],
    }
    return {
        f"{latency}_p{percent}_ms": float(value) * 1000
        for latency, seconds in samples.items()
        if seconds
        for percent, value in zip(PERCENTILES, _percentiles(seconds), strict=True)
    }


def _percentiles(samples: Sequence[float]) -> Iterable[float]:
    """Return values that were measured, and none between two."""
    return np.percentile(samples, PERCENTILES, method="inverted_cdf")


def medians(summaries: Sequence[Summary]) -> Summary:
    """Return one summary of several runs: the medians of their values, the sums of their counts."""
    errors = (s.first_error for s in summaries if s.first_error is not None)
    return Summary(
        num_requests=sum(summary.num_requests for summary in summaries),
        num_failed=sum(summary.num_failed for summary in summaries),
        first_error=next(errors, None),
        values=_medians([summary.values for summary in summaries]),
    )


def _medians(columns: Sequence[Values]) -> dict[str, float]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: median(c[name] for c in columns if name in c) for name in names}


def _duration(records: Sequence[RequestRecord]) -> float:
    """Return the seconds from the first request to the last end; failed ones take time too."""
    if not records:
        return 0.0
    return max(record.ended for record in records) - min(record.sent for record in records)


def _values(good: Sequence[RequestRecord], duration: float) -> Values:
    if not good or duration <= 0:
        return {}
    values = _token_counts(good)
    values["duration_s"] = duration
    values["output_throughput"] = values["output_tokens"] / duration
    if "prompt_tokens" in values:
        num_tokens = values["prompt_tokens"] + values["output_tokens"]
        values["total_throughput"] = num_tokens / duration
    values["request_throughput"] = len(good) / duration
    return values | latencies(good)


def _token_counts(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Sum up the tokens; a count that the server does not send is left out, which is not 0."""
    prompt = [r.num_prompt_tokens for r in records if r.num_prompt_tokens is not None]
    cached = [r.num_cached_tokens for r in records if r.num_cached_tokens is not None]
    counts: dict[str, float] = {"output_tokens": sum(r.num_output_tokens for r in records)}
    if prompt:
        counts["prompt_tokens"] = sum(prompt)
    if cached:
        counts["cached_tokens"] = sum(cached)
    return counts

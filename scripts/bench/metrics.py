"""From records to numbers, by the formulas of vLLM's serving benchmark.

TPOT is (E2E - TTFT) / (output tokens - 1) of each request; ITL are the gaps between the chunks
with text, of all requests together; failed requests count in no latency and no throughput.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from batching.percentile import percentile
from scripts.bench.records import RequestRecord

Values = Mapping[str, float]

LATENCIES: Final = ("ttft", "tpot", "itl", "e2e")
PERCENTILES: Final = (50, 90, 99)

# What a limit of `--goodput` can be about: what each request has one of.
LIMITED: Final = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a summary, and how reports write it."""

    name: str
    label: str
    digits: int = 0
    better: Literal["higher", "lower"] | None = None


def latency_name(latency: str, percent: int) -> str:
    return f"{latency}_p{percent}_ms"


METRICS: Final = (
    Metric("prompt_tokens", "prompt tokens"),
    Metric("cached_tokens", "cached tokens"),
    Metric("output_tokens", "output tokens"),
    Metric("duration_s", "time, s", 2),
    Metric("output_throughput", "output, tok/s", 1, "higher"),
    Metric("total_throughput", "prompt + output, tok/s", 1, "higher"),
    Metric("request_throughput", "requests/s", 2, "higher"),
    Metric("goodput", "goodput, requests/s", 2, "higher"),
    *(
        Metric(latency_name(latency, percent), f"{latency.upper()} p{percent}, ms", 1, "lower")
        for latency in LATENCIES
        for percent in PERCENTILES
    ),
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one run, or the medians of several; `values` lacks what is not known."""

    num_requests: int
    num_failed: int
    first_error: str | None
    values: Values
    by_priority: Mapping[str, Values]


def summarise(records: Sequence[RequestRecord], limits: Values | None = None) -> Summary:
    """Sum up a run; `limits` are milliseconds that a good request does not exceed."""
    good = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    priorities = dict.fromkeys(r.priority for r in good if r.priority is not None)
    return Summary(
        num_requests=len(records),
        num_failed=len(errors),
        first_error=next(iter(errors), None),
        values=_values(good, _duration(records), limits),
        by_priority={
            priority: latencies([r for r in good if r.priority == priority])
            for priority in priorities
        },
    )


def latencies(records: Iterable[RequestRecord]) -> dict[str, float]:
    """Return the percentiles of all latencies that the requests have, in milliseconds."""
    records = list(records)
    samples: dict[str, list[float | None]] = {
        "ttft": [r.ttft for r in records],
        "tpot": [r.tpot for r in records],
        "itl": [gap for r in records for gap in r.gaps],
        "e2e": [r.e2e for r in records],
    }
    values = {}
    for latency in LATENCIES:
        ordered = sorted(sample for sample in samples[latency] if sample is not None)
        for percent in PERCENTILES if ordered else ():
            values[latency_name(latency, percent)] = percentile(ordered, percent) * 1000
    return values


def medians(summaries: Sequence[Summary]) -> Summary:
    """Return one summary of several runs: the medians of their values, the sums of their counts."""
    priorities = dict.fromkeys(name for summary in summaries for name in summary.by_priority)
    errors = (s.first_error for s in summaries if s.first_error is not None)
    return Summary(
        num_requests=sum(summary.num_requests for summary in summaries),
        num_failed=sum(summary.num_failed for summary in summaries),
        first_error=next(errors, None),
        values=_medians([summary.values for summary in summaries]),
        by_priority={
            name: _medians([s.by_priority[name] for s in summaries if name in s.by_priority])
            for name in priorities
        },
    )


def ratio(ours: Values, theirs: Values, name: str) -> float | None:
    """Return how many times the peer's value ours is; None if there is nothing to compare."""
    if name not in ours or not theirs.get(name):
        return None
    return ours[name] / theirs[name]


def _medians(columns: Sequence[Values]) -> dict[str, float]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: median(c[name] for c in columns if name in c) for name in names}


def _duration(records: Sequence[RequestRecord]) -> float:
    """Return the seconds from the first request to the last end; failed ones take time too."""
    if not records:
        return 0.0
    return max(record.ended for record in records) - min(record.sent for record in records)


def _values(good: Sequence[RequestRecord], duration: float, limits: Values | None) -> Values:
    if not good or duration <= 0:
        return {}
    values = _token_counts(good)
    values["duration_s"] = duration
    values["output_throughput"] = values["output_tokens"] / duration
    if "prompt_tokens" in values:
        num_tokens = values["prompt_tokens"] + values["output_tokens"]
        values["total_throughput"] = num_tokens / duration
    values["request_throughput"] = len(good) / duration
    if limits is not None:
        values["goodput"] = sum(_is_within(record, limits) for record in good) / duration
    return values | latencies(good)


def _token_counts(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Sum up the tokens; a count that the server never told is left out, which is not 0."""
    prompt = [r.num_prompt_tokens for r in records if r.num_prompt_tokens is not None]
    cached = [r.num_cached_tokens for r in records if r.num_cached_tokens is not None]
    counts: dict[str, float] = {"output_tokens": sum(r.num_output_tokens for r in records)}
    if prompt:
        counts["prompt_tokens"] = sum(prompt)
    if cached:
        counts["cached_tokens"] = sum(cached)
    return counts


def _is_within(record: RequestRecord, limits: Values) -> bool:
    """True if the request keeps all limits; what it does not have keeps any limit."""
    measured = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
    return all((measured[name] or 0.0) * 1000 <= limit for name, limit in limits.items())

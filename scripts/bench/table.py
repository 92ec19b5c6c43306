"""Results as tables, for the terminal and for the HTML report alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from scripts.bench.metrics import LATENCIES, METRICS, Metric, Summary, Values, latency_name, ratio
from scripts.bench.plan import Plan, Point
from scripts.bench.scenarios import PRIORITIES
from scripts.bench.session import Outcome

_UNKNOWN: Final = "-"
# Ratios nearer to 1 than this are no difference worth a colour.
_NOISE: Final = 0.02

_BY_NAME: Final = {metric.name: metric for metric in METRICS}
_OVERVIEW: Final = (
    "output_throughput",
    "request_throughput",
    "goodput",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "itl_p99_ms",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A text; of a ratio, whether it is good news."""

    text: str
    is_better: bool | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """The first `num_labels` columns are words, the others numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    num_labels: int = 1
    footnotes: tuple[str, ...] = ()


Row = tuple[Cell, ...]


def overview(outcome: Outcome) -> Table:
    """Return one line for each point and server."""
    known = {name for result in outcome.results for name in result.summary().values}
    metrics = [_BY_NAME[name] for name in _OVERVIEW if name in known]
    rows = [
        _overview_row(point, server, summary, first, metrics)
        for point in outcome.points
        for summaries in [outcome.summaries(point)]
        for first in [next(iter(summaries.values()))]
        for server, summary in summaries.items()
    ]
    labels = [metric.label for metric in metrics]
    header = ("load", "server", *labels, "output, first / this", "failed")
    return Table("Overview", header, tuple(rows), num_labels=2)


def _overview_row(
    point: Point, server: str, summary: Summary, first: Summary, metrics: Sequence[Metric]
) -> Row:
    ratio_cell = _ratio_cell(first.values, summary.values, _BY_NAME["output_throughput"])
    return (
        Cell(point.title),
        Cell(server),
        *(Cell(_number(summary.values, metric)) for metric in metrics),
        Cell("") if summary is first else ratio_cell,
        Cell(str(summary.num_failed)),
    )


def details(outcome: Outcome, plan: Plan) -> Iterator[Table]:
    """Yield the tables of each point: all numbers, and the latencies by priority."""
    for point in outcome.points:
        yield _all_numbers(outcome, plan, point)
        if point.scenario.has_priorities:
            yield _by_priority(outcome, point)


def failures(outcome: Outcome) -> Iterator[str]:
    """Yield a line for each point and server at which requests failed, with the first message."""
    for result in outcome.results:
        summary = result.summary()
        if summary.num_failed:
            yield (
                f"{result.point.title}: {summary.num_failed} of {summary.num_requests} requests "
                f"to {result.server} failed; the first: {summary.first_error}"
            )


def _header(servers: Sequence[str]) -> tuple[str, ...]:
    """Return the servers and, behind each peer, what the first one is to it."""
    first, *peers = servers
    return (first, *(title for peer in peers for title in (peer, f"{first} / {peer}")))


def _all_numbers(outcome: Outcome, plan: Plan, point: Point) -> Table:
    summaries = outcome.summaries(point)
    ours, *theirs = summaries.values()
    known = {name for summary in summaries.values() for name in summary.values}
    rows = [
        _count_row("requests", [s.num_requests for s in summaries.values()]),
        _count_row("failed", [s.num_failed for s in summaries.values()]),
        *(
            _row(metric.label, metric, ours.values, [s.values for s in theirs])
            for metric in METRICS
            if metric.name in known
        ),
    ]
    return Table(
        title=f"{point.title}, {point.max_tokens} output tokens at most",
        header=("", *_header(list(summaries))),
        rows=tuple(rows),
        footnotes=tuple(_footnotes(outcome, plan, point)),
    )


def _footnotes(outcome: Outcome, plan: Plan, point: Point) -> Iterator[str]:
    yield point.scenario.description
    if plan.limits is not None:
        limits = (f"{name.upper()} within {limit:g} ms" for name, limit in plan.limits.items())
        yield f"good requests have {' and '.join(limits)}"
    if plan.rounds > 1:
        yield f"medians of {plan.rounds} rounds, requests and failed in all; output tok/s by round:"
        for result in outcome.results:
            if result.point == point:
                rates = (_number(s.values, _BY_NAME["output_throughput"]) for s in result.rounds)
                yield f"  {result.server}: {', '.join(rates)}"


def _by_priority(outcome: Outcome, point: Point) -> Table:
    summaries = outcome.summaries(point)
    rows = []
    for latency in LATENCIES:
        for percent in (50, 99):
            metric = _BY_NAME[latency_name(latency, percent)]
            for priority in PRIORITIES:
                ours, *theirs = (s.by_priority.get(priority, {}) for s in summaries.values())
                rows.append(_row(f"{metric.label}, {priority}", metric, ours, theirs))
    return Table(f"{point.title}, by priority", ("", *_header(list(summaries))), tuple(rows))


def _count_row(label: str, counts: Sequence[int]) -> Row:
    first, *others = (Cell(str(count)) for count in counts)
    return (Cell(label), first, *(cell for other in others for cell in (other, Cell(""))))


def _row(label: str, metric: Metric, ours: Values, theirs: Sequence[Values]) -> Row:
    cells = [Cell(label), Cell(_number(ours, metric))]
    for values in theirs:
        cells += [Cell(_number(values, metric)), _ratio_cell(ours, values, metric)]
    return tuple(cells)


def _number(values: Values, metric: Metric) -> str:
    if metric.name not in values:
        return _UNKNOWN
    return f"{values[metric.name]:.{metric.digits}f}"


def _ratio_cell(ours: Values, theirs: Values, metric: Metric) -> Cell:
    times = ratio(ours, theirs, metric.name)
    if metric.better is None or times is None:
        return Cell("")
    if abs(times - 1) < _NOISE:
        return Cell(f"{times:.2f}x")
    return Cell(f"{times:.2f}x", is_better=(times > 1) == (metric.better == "higher"))

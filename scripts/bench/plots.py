"""Which charts a run gives."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from scripts.bench.metrics import PERCENTILES, Summary, Values, latency_name
from scripts.bench.panels import Bar, Bars, Line, Lines, Range, Ranges, series_color
from scripts.bench.pictures import Chart
from scripts.bench.plan import ClosedLoop, Point
from scripts.bench.scenarios import PRIORITIES
from scripts.bench.session import Outcome
from scripts.bench.steps import StepTime

# Inches: of a panel with lines, and of one with rows.
_PANEL: Final = 3.1
_ROW: Final = 0.42
_MARGIN: Final = 0.9

_RANGES_LEGEND: Final = "full dot: p50, small dot: p90, open dot: p99"
_COMPARED: Final = (
    ("output_throughput", "Output, tokens per second"),
    ("ttft_p50_ms", "Time to first token, p50, ms"),
    ("tpot_p50_ms", "Time per output token, p50, ms"),
)
_TITLES: Final = {
    "ttft": "Time to first token, ms",
    "itl": "Inter-token latency, ms",
    "e2e": "Whole answer, ms",
}
# Line style and opacity by percentile.
_STROKES: Final = {50: ("-", 1.0), 90: ("--", 0.8), 99: (":", 0.8)}


def charts(outcome: Outcome, steps: Sequence[StepTime]) -> list[Chart]:
    """Return the charts that the results have numbers for."""
    sweeps: dict[str, list[Point]] = {}
    for point in outcome.points:
        if all(summary.values for summary in outcome.summaries(point).values()):
            sweeps.setdefault(point.scenario.name, []).append(point)
    # Of a sweep, the heaviest load stands for the scenario.
    last_points = [points[-1] for points in sweeps.values()]
    found = [
        chart
        for points in sweeps.values()
        if len(points) > 1
        for chart in (_throughput_sweep(outcome, points), _latency_sweep(outcome, points))
    ]
    found += _comparisons(outcome, last_points)
    if last_points:
        found.append(_latency_ranges(outcome, last_points))
    found += [_priorities(outcome, p) for p in last_points if p.scenario.has_priorities]
    if steps:
        found.append(_step_times(steps))
    return found or [Chart("Nothing to plot", "no request succeeded", _MARGIN, ())]


def _colors(outcome: Outcome, point: Point) -> Iterator[tuple[str, Summary, str]]:
    """Yield the servers with their numbers; a server has the same colour in all charts."""
    for number, (server, summary) in enumerate(outcome.summaries(point).items()):
        yield server, summary, series_color(number)


def _throughput_sweep(outcome: Outcome, points: Sequence[Point]) -> Chart:
    lines = [
        Line(server, color, _over_clients(outcome, points, server, "output_throughput"))
        for server, _, color in _colors(outcome, points[0])
    ]
    return Chart(
        f"{points[0].scenario.name}: throughput against clients",
        points[0].scenario.description,
        _PANEL,
        (Lines("Output, tokens per second", "clients", lines, is_linear=True),),
    )


def _latency_sweep(outcome: Outcome, points: Sequence[Point]) -> Chart:
    by_latency = {
        latency: _percentile_lines(outcome, points, latency) for latency in ("ttft", "itl")
    }
    return Chart(
        f"{points[0].scenario.name}: latency against clients",
        points[0].scenario.description,
        _PANEL,
        tuple(
            Lines(_TITLES[latency], "clients", lines)
            for latency, lines in by_latency.items()
            if lines
        ),
    )


def _percentile_lines(outcome: Outcome, points: Sequence[Point], latency: str) -> list[Line]:
    """Return all percentiles of one server, or of several only the outer ones."""
    servers = list(_colors(outcome, points[0]))
    shown = PERCENTILES if len(servers) == 1 else (PERCENTILES[0], PERCENTILES[-1])
    lines = []
    for server, _, color in servers:
        for percent in shown:
            over = _over_clients(outcome, points, server, latency_name(latency, percent))
            label = f"p{percent}" if len(servers) == 1 else f"{server} p{percent}"
            style, alpha = _STROKES[percent]
            lines.append(Line(label, color, over, style, alpha))
    return [line for line in lines if line.points]


def _over_clients(
    outcome: Outcome, points: Sequence[Point], server: str, name: str
) -> list[tuple[float, float]]:
    return [
        (float(point.arrivals.num_clients), summary.values[name])
        for point in points
        for summary in [outcome.summaries(point).get(server)]
        if isinstance(point.arrivals, ClosedLoop) and summary and name in summary.values
    ]


def _comparisons(outcome: Outcome, points: Sequence[Point]) -> Iterator[Chart]:
    """Yield a chart for each scenario that several servers had, or one of all scenarios."""
    compared = [point for point in points if len(outcome.summaries(point)) > 1]
    for point in compared:
        panels = tuple(_bars(outcome, [point], name, title) for name, title in _COMPARED)
        height = _MARGIN + _ROW * len(outcome.summaries(point))
        shown = tuple(panel for panel in panels if panel.bars)
        legend = f"{point.scenario.description}; more tokens and less time are better"
        yield Chart(f"{point.title}: servers compared", legend, height, shown)
    if not compared and len(points) > 1:
        panel = _bars(outcome, points, "output_throughput", "Output, tokens per second")
        yield Chart("Throughput by scenario", "", _MARGIN + _ROW * len(points), (panel,))


def _bars(outcome: Outcome, points: Sequence[Point], name: str, title: str) -> Bars:
    bars = [
        Bar(server if len(points) == 1 else point.title, color, summary.values[name])
        for point in points
        for server, summary, color in _colors(outcome, point)
        if name in summary.values
    ]
    return Bars(title, bars)


def _latency_ranges(outcome: Outcome, points: Sequence[Point]) -> Chart:
    rows = [
        (_range_label(outcome, point, server), color, summary.values)
        for point in points
        for server, summary, color in _colors(outcome, point)
    ]
    return _ranges_chart("Latency percentiles", rows, ("ttft", "itl"))


def _range_label(outcome: Outcome, point: Point, server: str) -> str:
    is_alone = len(outcome.summaries(point)) == 1
    return point.title if is_alone else f"{point.scenario.name}, {server}"


def _priorities(outcome: Outcome, point: Point) -> Chart:
    rows = [
        (f"{priority}, {server}", color, summary.by_priority[priority])
        for server, summary, color in _colors(outcome, point)
        for priority in PRIORITIES
        if priority in summary.by_priority
    ]
    return _ranges_chart(f"{point.title}: latency by priority", rows, ("ttft", "e2e"))


def _ranges_chart(
    title: str, rows: Sequence[tuple[str, str, Values]], latencies: Iterable[str]
) -> Chart:
    panels = [
        Ranges(
            _TITLES[latency],
            [
                Range(label, color, *(values[latency_name(latency, p)] for p in PERCENTILES))
                for label, color, values in rows
                # Answers of a single token have no gaps.
                if latency_name(latency, PERCENTILES[0]) in values
            ],
        )
        for latency in latencies
    ]
    shown = tuple(panel for panel in panels if panel.ranges)
    return Chart(title, _RANGES_LEGEND, _MARGIN + _ROW * len(rows), shown)


def _step_times(steps: Sequence[StepTime]) -> Chart:
    by_context = [(step.context, step.rows, step.seconds) for step in steps]
    by_rows = [(step.rows, step.context, step.seconds) for step in steps]
    return Chart(
        "Time of a step",
        "a step computes the next token of each row; context is what a row has before it",
        _PANEL,
        (
            _step_lines("Milliseconds by context", "rows", "context {}", by_context),
            _step_lines("Milliseconds by rows", "context, tokens", "{} rows", by_rows),
        ),
    )


def _step_lines(
    title: str, x_label: str, label: str, steps: Sequence[tuple[int, int, float]]
) -> Lines:
    """Return a line for each first number of the steps, over the second; they darken upwards."""
    keys = sorted({key for key, _, _ in steps})
    lines = [
        Line(
            label.format(key),
            series_color(0),
            [(float(x), seconds * 1000) for other, x, seconds in steps if other == key],
            alpha=1 - 0.65 * (len(keys) - 1 - place) / max(1, len(keys) - 1),
        )
        for place, key in enumerate(keys)
    ]
    return Lines(title, x_label, lines)

"""The results: all of them as JSON, the medians as a table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from scripts.bench.load.metrics import Summary, Values, medians
from scripts.bench.load.plan import Plan, Point
from scripts.bench.load.servers import Target
from scripts.bench.load.session import Outcome

# The table's columns: a value's name, its title, and its digits.
_COLUMNS: Final = (
    ("output_throughput", "output tok/s", 1),
    ("request_throughput", "requests/s", 2),
    ("ttft_p50_ms", "TTFT p50", 0),
    ("ttft_p99_ms", "TTFT p99", 0),
    ("tpot_p50_ms", "TPOT p50", 1),
    ("itl_p99_ms", "ITL p99", 1),
    ("e2e_p50_ms", "E2E p50", 0),
)
_UNKNOWN: Final = "-"


def as_json(
    outcome: Outcome, plan: Plan, targets: Sequence[Target], circumstances: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all of a run in types that JSON has."""
    common = (
        "rounds",
        "num_warmup_requests",
        "seed",
        "timeout",
        "ignores_eos",
    )
    return {
        **circumstances,
        "num_failed": outcome.num_failed,
        "notes": outcome.notes,
        "plan": {name: getattr(plan, name) for name in common},
        "servers": [{"name": t.name, "url": t.url, "model": t.model} for t in targets],
        "results": [
            {
                "scenario": point.scenario.name,
                "description": point.scenario.description,
                "load": {"label": point.arrivals.label, **asdict(point.arrivals)},
                "max_tokens": point.max_tokens,
                "server": server,
                "median": asdict(medians(rounds)),
                "rounds": [asdict(summary) for summary in rounds],
            }
            for point, by_server in outcome.rounds.items()
            for server, rounds in by_server.items()
        ],
    }


def table(outcome: Outcome) -> str:
    """Return the medians, a line for each load and server; latencies are in milliseconds."""
    rows = [row for point in outcome.rounds for row in _rows(outcome, point)]
    known = {name for _, _, values in rows for name in values}
    columns = [column for column in _COLUMNS if column[0] in known]
    lines = [["load", "server", *(title for _, title, _ in columns)]]
    for load, server, values in rows:
        lines.append([load, server, *(_number(values, name, n) for name, _, n in columns)])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(_line(cells, widths) for cells in lines)


def _rows(outcome: Outcome, point: Point) -> Iterator[tuple[str, str, Values]]:
    for server, rounds in outcome.rounds[point].items():
        yield point.title, server, medians(rounds).values


def _number(values: Values, name: str, digits: int) -> str:
    return f"{values[name]:.{digits}f}" if name in values else _UNKNOWN


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Align the two columns of words to the left, the numbers to the right."""
    words = (cell.ljust(width) for cell, width in zip(cells[:2], widths, strict=False))
    numbers = (cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True))
    return "  ".join([*words, *numbers])


def remarks(outcome: Outcome) -> Iterator[str]:
    """Yield what a reader should know: output by round, failed requests, notes."""
    for point, by_server in outcome.rounds.items():
        for server, rounds in by_server.items():
            if len(rounds) > 1:
                rates = ", ".join(_number(s.values, "output_throughput", 1) for s in rounds)
                yield f"{point.title}, {server}: output tok/s by round: {rates}"
            summary: Summary = medians(rounds)
            if summary.num_failed:
                yield (
                    f"{point.title}: {summary.num_failed} of {summary.num_requests} requests "
                    f"to {server} failed; the first: {summary.first_error}"
                )
    yield from (f"note: {note}" for note in outcome.notes)

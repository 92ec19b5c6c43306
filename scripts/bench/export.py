"""Everything as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.bench.machine import Machine
from scripts.bench.metrics import METRICS, ratio
from scripts.bench.plan import Plan
from scripts.bench.records import RequestRecord
from scripts.bench.servers import Server
from scripts.bench.session import Outcome, Result


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a reader needs to repeat the run."""

    command: str
    started: str
    note: str
    machine: Machine


def as_json(
    outcome: Outcome,
    plan: Plan,
    servers: Sequence[Server],
    circumstances: Circumstances,
    *,
    with_requests: bool,
) -> dict[str, Any]:
    """Return all of a run in types that JSON has."""
    return {
        **asdict(circumstances),
        "is_complete": outcome.is_complete,
        "num_failed": outcome.num_failed,
        "notes": outcome.notes,
        "plan": _plan(plan),
        "servers": [{"name": s.name, "url": s.url, "model": s.model} for s in servers],
        "results": [_result(result, outcome, with_requests) for result in outcome.results],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "rounds": plan.rounds,
        "num_warmup_requests": plan.num_warmup_requests,
        "seed": plan.seed,
        "timeout": plan.timeout,
        "time_limit": plan.time_limit,
        "goodput": None if plan.limits is None else dict(plan.limits),
    }


def _result(result: Result, outcome: Outcome, with_requests: bool) -> dict[str, Any]:
    told = {
        "scenario": result.point.scenario.name,
        "load": {"label": result.point.arrivals.label, **asdict(result.point.arrivals)},
        "max_tokens": result.point.max_tokens,
        "server": result.server,
        "median": asdict(result.summary()),
        "first_to_this": _ratios(result, outcome),
        "rounds": [asdict(summary) for summary in result.rounds],
    }
    if with_requests:
        told["requests"] = [[_request(record) for record in round_] for round_ in result.records]
    return told


def _ratios(result: Result, outcome: Outcome) -> dict[str, float]:
    """Return what the first server's medians are to this one's."""
    first = next(iter(outcome.summaries(result.point).values())).values
    these = result.summary().values
    ratios = {metric.name: ratio(first, these, metric.name) for metric in METRICS if metric.better}
    return {name: times for name, times in ratios.items() if times is not None}


def _request(record: RequestRecord) -> dict[str, Any]:
    """Return a request without its text; times count from when it was sent."""
    told = asdict(record)
    del told["text"]
    told["chunk_times"] = [time - record.sent for time in record.chunk_times]
    return told | {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}

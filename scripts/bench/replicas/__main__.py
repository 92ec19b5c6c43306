"""`python -m scripts.bench.replicas`: what a second replica brings, and what a router that knows prefixes saves.

It starts two servers of one thread each, on a core of their own, and smg before one or both of them.  First long
answers, by one and by both in turns: the goal is 1.9 times the throughput on two cores.  Then tenants whose
instructions one pool cannot hold, with cache_aware and with round_robin: the goal is 0.4 of the tokens computed.  It
takes six minutes and needs a machine that does nothing else.  `python -m scripts.simulation compare` simulates what
--json has.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, Final

from scripts.bench.load.signals import ended_by_signals, run_until_signal
from scripts.bench.replicas.clients import RequestFailed, serve
from scripts.bench.replicas.machines import NUM_BLOCKS, Counts, MeasuredSmg, replicas, smg
from scripts.cluster.replica import Replica
from scripts.cluster.router import NotInstalled
from scripts.machine import describe, in_words
from scripts.server_process import ServerFailed
from scripts.simulation.records import Summary, summarise
from scripts.simulation.report import table
from scripts.simulation.simulate import Setup
from scripts.simulation.traces import Trace, make_trace

_FAILED, _CANNOT_BEGIN, _INTERRUPTED = 1, 2, 130
_AWARE, _IN_TURNS = "prefix-aware", "round robin"
# By the simulation's names.
_SMG_POLICIES: Final = {_AWARE: "cache_aware", _IN_TURNS: "round_robin"}

# Trace, policy and number of replicas.
Load = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one load.

    num_computed: prompt tokens that the replicas computed, by their own counters.
    client_share: of a core that the clients used.
    """

    setup: Setup
    summary: Summary
    num_computed: int
    client_share: float

    @property
    def load(self) -> Load:
        return self.setup.trace, self.setup.policy, self.setup.num_replicas


def measure(setup: Setup, trace: Trace, router: MeasuredSmg, behind: Sequence[Replica]) -> Run:
    """Give the replicas a trace.

    Raises:
        RequestFailed: by a request.
    """
    assert trace.num_blocks == NUM_BLOCKS, "what is simulated has as many"
    before, began = Counts.of(behind), process_time()
    served = run_until_signal(serve(trace, router.url, streams=setup.trace != "answers"))
    used, found = process_time() - began, Counts.of(behind)
    num_prompt, num_cached = (b - a for a, b in zip(before, found, strict=True))
    seconds = max(s.ended for s in served) - min(s.sent for s in served)
    run = Run(setup, summarise(served), round(num_prompt - num_cached), used / seconds)
    print(f"{', '.join(map(str, run.load))}: {seconds:.1f} s", file=sys.stderr)
    return run


def router_cost(both: Sequence[Replica], folder: Path) -> float:
    """Return the microseconds of a core that smg uses for a request with a prompt of some 900 tokens."""
    [session, *_], *_ = make_trace("tenants", 1, seed=-1).clients
    short = session._replace(turns=(session.turns[0]._replace(max_tokens=1),))
    trace = Trace("router", ((short,) * 25,) * 8, NUM_BLOCKS)
    with smg(both, folder, "cache_aware") as router:
        before = router.cpu_seconds
        run_until_signal(serve(trace, router.url, streams=False))
        return (router.cpu_seconds - before) / trace.num_requests * 1e6


def long_answers(both: Sequence[Replica], folder: Path, rounds: int) -> Iterator[Run]:
    """Yield rounds of long answers by one replica and by both, in turns."""
    with smg(both[:1], folder, "cache_aware") as alone, smg(both, folder, "cache_aware") as before:
        for number in range(rounds):
            for count, router in ((1, alone), (2, before)):
                setup = Setup(trace="answers", policy=_AWARE, num_replicas=count, seed=number)
                yield measure(setup, make_trace("answers", count, number), router, both)


def tenants(both: Sequence[Replica], folder: Path, rounds: int) -> Iterator[Run]:
    """Yield rounds of tenants with both policies, other tenants each time; the router knows nothing at first."""
    for number in range(rounds):
        for policy, of_smg in _SMG_POLICIES.items():
            # What the pools have of others is evicted first.
            seed = 2 * number + (policy == _AWARE)
            setup = Setup(trace="tenants", policy=policy, num_replicas=2, seed=seed)
            with smg(both, folder, of_smg) as router:
                yield measure(setup, make_trace("tenants", 2, seed), router, both)


def report(runs: Sequence[Run], router_us: float) -> str:
    """Return the medians as a table, and what the goals are about."""
    by_load: dict[Load, list[Run]] = {}
    for run in runs:
        by_load.setdefault(run.load, []).append(run)
    head = ("trace", "policy", "replicas", "output tokens/s", "first token p50", "computed")
    one, two = (by_load["answers", _AWARE, count] for count in (1, 2))
    gains = [
        b.summary.output_per_second / a.summary.output_per_second
        for a, b in zip(one, two, strict=True)
    ]
    aware, in_turns = (
        [run.num_computed for run in by_load["tenants", policy, 2]] for policy in _SMG_POLICIES
    )
    shares = [a / b for a, b in zip(aware, in_turns, strict=True)]
    share = sum(aware) / sum(in_turns)
    clients = max(run.client_share for run in runs)
    return "\n".join(
        [
            table(head, [_row(load, found) for load, found in by_load.items()]),
            "",
            f"two replicas: {median(gains):.2f} times the throughput of one ({_listed(gains)})",
            f"cache_aware: {share:.2f} of the tokens that round_robin computes ({_listed(shares)})",
            f"smg: {router_us:.0f} us of a core for a request; the clients: up to {clients:.1%} of one",
        ]
    )


def _listed(by_round: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in by_round)


def _row(load: Load, runs: Sequence[Run]) -> list[str]:
    trace, policy, count = load
    first = median(run.summary.first_p50 for run in runs)
    return [
        trace,
        policy,
        str(count),
        f"{median(run.summary.output_per_second for run in runs):.1f}",
        "-" if trace == "answers" else f"{first:.2f} s",
        f"{median(run.num_computed for run in runs):.0f}",
    ]


def as_json(runs: Sequence[Run], router_us: float) -> dict[str, Any]:
    """Return what `scripts.simulation compare` reads."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": describe(),
        "router_us": router_us,
        "runs": [_run_as_json(run) for run in runs],
    }


def _run_as_json(run: Run) -> dict[str, Any]:
    names = ("trace", "policy", "num_replicas", "seed")
    summary = asdict(run.summary) | {"num_computed": run.num_computed}
    if run.setup.trace == "answers":  # not streamed
        del summary["first_p50"], summary["first_p99"]
    return {
        "setup": {name: getattr(run.setup, name) for name in names},
        "summary": summary,
        "client_share": run.client_share,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.replicas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    words = "let the servers run on all cores: one alone then uses some of the second"
    parser.add_argument("--any-core", action="store_true", help=words)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"{args.rounds} rounds measure nothing")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"there is no directory {args.json.parent}")
    try:
        with ended_by_signals(), TemporaryDirectory() as name:
            folder = Path(name)
            with replicas(2, folder, is_pinned=not args.any_core) as both:
                router_us = router_cost(both, folder)
                runs = [
                    *long_answers(both, folder, args.rounds),
                    *tenants(both, folder, args.rounds),
                ]
    except (NotInstalled, ServerFailed, TimeoutError) as error:
        print(error, file=sys.stderr)
        return _CANNOT_BEGIN
    except RequestFailed as error:
        print(f"a request failed: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    print(in_words(describe()), "", report(runs, router_us), sep="\n")
    if args.json is not None:
        text = json.dumps(as_json(runs, router_us), indent=2) + "\n"
        args.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

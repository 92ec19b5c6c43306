"""`python -m scripts.simulation`: replicas behind routers, on paper."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Final

from scripts.simulation.compare import compare, read_runs
from scripts.simulation.costs import COSTS, StepCosts
from scripts.simulation.policies import POLICIES
from scripts.simulation.report import HEAD, cells, table
from scripts.simulation.simulate import Setup, figures
from scripts.simulation.traces import TRACES

_DESCRIPTION: Final = """\
Simulates 1 to 1,000 replicas behind routers.  Each replica is the server's own scheduler, with its queue,
blocks and prefix cache; instead of the model a clock moves by what a step takes, by a linear model that
`python -m scripts.simulation.measure` fits.

  run       simulate traces, policies and numbers of replicas; print a table
  compare   simulate what scripts.bench.replicas has measured, from its --json
"""
_UNUSABLE: Final = 2
_REPLICAS: Final = (1, 2, 10, 100, 1000)
_TRACES: Final = ("agents", "chat", "tenants")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit status, 2 for a file that cannot be used."""
    args = _parser().parse_args(argv)
    try:
        costs = StepCosts.load(args.costs)
        runs = read_runs(args.results) if args.command == "compare" else []
    except (OSError, ValueError, LookupError, TypeError) as error:
        print(f"a file cannot be used: {error!r}", file=sys.stderr)
        return _UNUSABLE
    print(compare(runs, costs) if args.command == "compare" else _run(args, costs))
    return 0


def _run(args: argparse.Namespace, costs: StepCosts) -> str:
    setups = [
        Setup(
            trace=trace,
            policy=policy,
            num_replicas=num_replicas,
            num_routers=args.routers,
            router_seconds=args.router_us / 1e6,
            max_queue=args.max_queue,
            num_blocks=args.blocks,
            seed=args.seed,
        )
        for trace, num_replicas, policy in product(
            args.trace or _TRACES, args.replicas, args.policy or list(POLICIES)
        )
    ]
    found = figures(setups, costs, args.jobs)
    rows = [
        [setup.trace, f"{setup.num_replicas:,}", setup.policy, *cells(summary)]
        for setup, summary in zip(setups, found, strict=True)
    ]
    return table(["trace", "replicas", "policy", *HEAD], rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.simulation",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands.add_parser("run").add_argument)
    comparing = commands.add_parser("compare").add_argument
    comparing("results", type=Path, help="what scripts.bench.replicas has written")
    _add_costs(comparing)
    return parser


def _add_run(add: Callable[..., object]) -> None:
    add(
        "--trace",
        action="append",
        choices=list(TRACES),
        help=f"repeatable; default: {', '.join(_TRACES)}",
    )
    add("--policy", action="append", choices=list(POLICIES), help="repeatable; default: all")
    add(
        "--replicas", type=_counts, default=_REPLICAS, metavar="N[,N...]", help="default: 1 to 1000"
    )
    add("--routers", type=_count, default=1, help="before them; default: %(default)s")
    words = "microseconds of a router's core for a request; default: %(default)g"
    add("--router-us", type=_not_below_0, default=0.0, metavar="US", help=words)
    words = "requests in flight for each replica beyond which routers answer 429; default: no limit"
    add("--max-queue", type=_count, default=math.inf, metavar="N", help=words)
    add("--blocks", type=_count, help="of each pool; default: the trace's")
    add("--seed", type=int, default=0, help="of the traces; default: %(default)s")
    words = "processes that simulate; default: one for each core"
    add("--jobs", type=_count, default=os.cpu_count() or 1, metavar="N", help=words)
    _add_costs(add)


def _add_costs(add: Callable[..., object]) -> None:
    add(
        "--costs",
        type=Path,
        default=COSTS,
        help="what scripts.simulation.measure has printed; default: %(default)s",
    )


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a count")
    return number


def _counts(text: str) -> list[int]:
    return sorted({_count(part) for part in text.split(",")})


def _not_below_0(text: str) -> float:
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


if __name__ == "__main__":
    sys.exit(main())

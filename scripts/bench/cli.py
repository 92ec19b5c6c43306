"""The command line: what is asked for, checked."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

from scripts.bench.metrics import LIMITED
from scripts.bench.plan import Arrivals, ClosedLoop, OpenLoop, Plan, Point
from scripts.bench.scenarios import SCENARIOS, Scenario
from scripts.bench.servers import ServerSpec, our_server, server_at, server_by_command

_DESCRIPTION: Final = """\
Measures this server over HTTP, alone or beside others.

Without --url it starts `python -m app` with the MLX_SERVER_* settings of the environment, and ends
it. Peers get the same prompts in alternating rounds; servers that were started for the run are
stopped while they are not measured. Exits with 1 if a request failed, and with 2 if it cannot begin.
"""
_SUFFIXES: Final = (".html", ".png")
_DEFAULT_NUM_REQUESTS: Final = 64


@dataclass(frozen=True, slots=True)
class Options:
    """All that a run needs to know; the first server is the one that the others are compared to."""

    plan: Plan
    servers: tuple[ServerSpec, ...]
    start_timeout: float
    json: str | None
    json_requests: bool
    report: Path | None
    steps: Path | None
    note: str


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; leave with status 2 if it makes no sense."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check(args, parser.error)
    return Options(
        plan=_plan(args),
        servers=_servers(args, parser.error),
        start_timeout=args.start_timeout,
        json=args.json,
        json_requests=args.json_requests,
        report=args.report,
        steps=args.steps,
        note=args.note,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=_DESCRIPTION,
        epilog="scenarios:\n"
        + "\n".join(f"  {s.name:<14} {s.description}" for s in SCENARIOS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_servers(parser.add_argument_group("servers"))
    _add_load(parser.add_argument_group("load"))
    _add_bounds(parser.add_argument_group("bounds"))
    _add_reports(parser.add_argument_group("reports"))
    return parser


def _add_servers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--url",
        type=_checked(server_at),
        metavar="[NAME=]URL[#MODEL]",
        help="measure this server instead of starting one",
    )
    group.add_argument("--model", help="model to ask for; default: the first that is listed")
    group.add_argument(
        "--vs",
        type=_checked(server_at),
        action="append",
        default=[],
        metavar="[NAME=]URL[#MODEL]",
        help="a peer that runs already; repeatable",
    )
    group.add_argument(
        "--vs-command",
        type=_checked(server_by_command),
        action="append",
        default=[],
        metavar="[NAME=]COMMAND[#MODEL]",
        help="a peer to start, with {port} where the port belongs; repeatable",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--scenario",
        action="append",
        choices=[*SCENARIOS, "all"],
        help="repeatable; default: short",
    )
    group.add_argument(
        "--clients",
        type=_counts,
        action="extend",
        metavar="N[,N...]",
        help="clients at once; several numbers make a sweep",
    )
    group.add_argument("--requests-per-client", type=_count, metavar="N")
    group.add_argument("--max-tokens", type=_count, metavar="N", help="tokens of each answer")
    group.add_argument(
        "--rate", type=_positive, metavar="R", help="open loop: arrivals per second, at random"
    )
    group.add_argument(
        "--num-requests",
        type=_count,
        metavar="N",
        help=f"requests of the open loop; default: {_DEFAULT_NUM_REQUESTS}",
    )
    group.add_argument("--rounds", type=_count, default=3, help="default: %(default)s")
    group.add_argument(
        "--warmup",
        type=_count_or_zero,
        default=2,
        metavar="N",
        help="requests before each measurement that do not count; default: %(default)s",
    )
    group.add_argument("--seed", type=int, default=0, help="of the prompts and the arrivals")


def _add_bounds(group: argparse._ArgumentGroup) -> None:
    for flag, default, words in (
        ("--timeout", 120.0, "seconds for a request"),
        ("--time-limit", 3600.0, "seconds for the whole run"),
        ("--start-timeout", 300.0, "seconds for a server to get ready"),
    ):
        group.add_argument(
            flag,
            type=_positive,
            default=default,
            metavar="S",
            help=f"{words}; default: %(default)g",
        )
    group.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        metavar="NAME:MS",
        help=f"what a good request does not exceed; names: {', '.join(LIMITED)}",
    )


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="FILE", help="write everything; - is standard output")
    group.add_argument("--json-requests", action="store_true", help="and each request in it")
    group.add_argument("--report", type=Path, metavar="FILE", help="plots, as .html or .png")
    group.add_argument(
        "--steps",
        type=Path,
        metavar="FILE",
        help="step times of scripts.microbench to plot too",
    )
    group.add_argument("--note", default="", help="a remark for the reports")


def _check(args: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> None:
    """Refuse what does not go together."""
    if args.rate is not None and (args.clients or args.requests_per_client):
        refuse("--rate has arrivals; --clients and --requests-per-client do not go with it")
    if args.num_requests is not None and args.rate is None:
        refuse("--num-requests goes with --rate only")
    if args.json_requests and args.json is None:
        refuse("--json-requests needs --json")
    if args.steps is not None and args.report is None:
        refuse("--steps needs --report")
    if args.report is not None and args.report.suffix not in _SUFFIXES:
        refuse(f"--report writes {' or '.join(_SUFFIXES)}, not {args.report.name!r}")
    for path in (args.report, args.json):
        if path is not None and not Path(path).parent.is_dir():
            refuse(f"there is no directory {Path(path).parent}")
    if args.report is not None and find_spec("matplotlib") is None:
        refuse("--report needs matplotlib: pip install --group bench")


def _servers(args: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> tuple[ServerSpec, ...]:
    first: ServerSpec = args.url or our_server(args.model)
    if first.model is None:
        first = replace(first, model=args.model)
    specs = (first, *args.vs, *args.vs_command)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            refuse(f"two servers are called {name!r}; write NAME=... to tell them apart")
    return specs


def _plan(args: argparse.Namespace) -> Plan:
    names = args.scenario or ["short"]
    chosen = SCENARIOS if "all" in names else dict.fromkeys(names)
    points = (point for name in chosen for point in _points(SCENARIOS[name], args))
    return Plan(
        points=tuple(points),
        rounds=args.rounds,
        num_warmup_requests=args.warmup,
        seed=args.seed,
        timeout=args.timeout,
        time_limit=args.time_limit,
        limits=None if args.goodput is None else dict(args.goodput),
    )


def _points(scenario: Scenario, args: argparse.Namespace) -> list[Point]:
    max_tokens = args.max_tokens or scenario.max_tokens
    return [Point(scenario, arrivals, max_tokens) for arrivals in _arrivals(scenario, args)]


def _arrivals(scenario: Scenario, args: argparse.Namespace) -> list[Arrivals]:
    if args.rate is not None:
        return [OpenLoop(args.rate, args.num_requests or _DEFAULT_NUM_REQUESTS)]
    per_client = args.requests_per_client or scenario.requests_per_client
    counts = sorted(set(args.clients or [scenario.num_clients]))
    return [ClosedLoop(num_clients, per_client) for num_clients in counts]


def _checked(read: Callable[[str], ServerSpec]) -> Callable[[str], ServerSpec]:
    """Return a reader whose complaint argparse shows; of a ValueError it would not."""

    def read_or_complain(text: str) -> ServerSpec:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_or_complain


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a count")
    return number


def _count_or_zero(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _limit(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition(":")
    if name not in LIMITED:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(LIMITED)}")
    return name, _positive(milliseconds)

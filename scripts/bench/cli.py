"""The command line: which servers get which load, checked."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from scripts.bench.load.plan import ClosedLoop, Plan, Point
from scripts.bench.load.scenarios import SCENARIOS, Scenario
from scripts.bench.load.servers import ServerSpec, our_server, server_at, server_by_command

_DESCRIPTION: Final = """\
Measures this server over HTTP, alone or beside others.

Without --url it starts `python -m app` with the MLX_SERVER_* settings of the environment, and ends
it. Peers get the same prompts in alternating rounds; servers that were started for the run are
paused while they are not measured. Exits with 1 if a request failed, and with 2 if it cannot begin.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """All that a run needs to know; the first server is the one that the others are compared to."""

    plan: Plan
    servers: tuple[ServerSpec, ...]
    json: str | None


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; exit with status 2 if it makes no sense."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.json is not None and not Path(args.json).parent.is_dir():
        parser.error(f"there is no directory {Path(args.json).parent}")
    return Options(
        plan=_plan(args),
        servers=_servers(args, parser.error),
        json=args.json,
    )


def _parser() -> argparse.ArgumentParser:
    scenarios = "\n".join(f"  {s.name:<14} {s.description}" for s in SCENARIOS.values())
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=_DESCRIPTION,
        epilog=f"scenarios:\n{scenarios}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_servers(parser.add_argument_group("servers").add_argument)
    _add_load(parser)
    _add_run(parser.add_argument_group("run").add_argument)
    return parser


def _add_servers(add: Callable[..., object]) -> None:
    at, by_command = _reader(server_at), _reader(server_by_command)
    url, command = "[NAME=]URL[#MODEL]", "[NAME=]COMMAND[#MODEL]"
    several = {"action": "append", "default": []}
    add("--url", type=at, metavar=url, help="measure this server instead of starting one")
    add("--model", help="model to ask for; default: the first that is listed")
    add("--vs", type=at, metavar=url, **several, help="a peer that runs already; repeatable")
    words = "a peer to start, with {port} where the port belongs; repeatable"
    add("--vs-command", type=by_command, metavar=command, **several, help=words)


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    choices = [*SCENARIOS, "all"]
    add("--scenario", action="append", choices=choices, help="repeatable; default: short")
    words = "at once; several numbers make a sweep"
    add("--clients", type=_counts, metavar="N[,N...]", help=words)
    add("--requests", type=_count, metavar="N", help="of each client")
    add("--max-tokens", type=_count, metavar="N", help="of each completion")
    words = "send ignore_eos, so that each completion has all its tokens; not all servers know it"
    add("--ignore-eos", action="store_true", help=words)
    add("--seed", type=int, default=0, help="of the prompts")


def _add_run(add: Callable[..., object]) -> None:
    add("--rounds", type=_count, default=3, help="default: %(default)s")
    words = "requests before each measurement that do not count; default: %(default)s"
    add("--warmup", type=_count_or_zero, default=2, metavar="N", help=words)
    words = "seconds for a request; default: %(default)g"
    add("--timeout", type=_positive, default=120.0, metavar="S", help=words)
    add("--json", metavar="FILE", help="write all results; - is standard output")


def _servers(args: argparse.Namespace, fail: Callable[[str], NoReturn]) -> tuple[ServerSpec, ...]:
    first: ServerSpec = args.url or our_server(args.model)
    first = replace(first, model=first.model or args.model)
    specs = (first, *args.vs, *args.vs_command)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            fail(f"two servers are called {name!r}; write NAME=... to tell them apart")
    return specs


def _plan(args: argparse.Namespace) -> Plan:
    names = args.scenario or ["short"]
    chosen = SCENARIOS if "all" in names else dict.fromkeys(names)
    return Plan(
        points=tuple(point for name in chosen for point in _points(SCENARIOS[name], args)),
        rounds=args.rounds,
        num_warmup_requests=args.warmup,
        seed=args.seed,
        timeout=args.timeout,
        ignores_eos=args.ignore_eos,
    )


def _points(scenario: Scenario, args: argparse.Namespace) -> list[Point]:
    max_tokens = args.max_tokens or scenario.max_tokens
    num_requests = args.requests or scenario.requests_per_client
    return [
        Point(scenario, ClosedLoop(num_clients, num_requests), max_tokens)
        for num_clients in args.clients or [scenario.num_clients]
    ]


def _reader(read: Callable[[str], ServerSpec]) -> Callable[[str], ServerSpec]:
    """Return a reader whose message argparse shows; of a ValueError it would not."""

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
    return sorted({_count(part) for part in text.split(",")})


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number

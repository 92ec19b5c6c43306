"""`python -m scripts.soak`: from the command line to the table."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from scripts.soak.checks import Check, lines
from scripts.soak.parts import Size, departing_clients, fair, long_run, overloaded

_MISSED: Final = 1
_INTERRUPTED: Final = 130
_DEFAULT: Final = Size()

PARTS: Final[Mapping[str, Callable[[Size], Iterator[Check]]]] = {
    "departures": departing_clients,
    "overload": overloaded,
    "fairness": fair,
    "long": long_run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and print what they show; return 1 if a bound is missed."""
    args = _parser().parse_args(argv)
    size = Size(
        num_leaving=args.clients,
        flood_time=args.seconds,
        num_low=args.low,
        long_time=60 * args.minutes,
        warm_up=60 * args.warm_up,
        seed=args.seed,
    )
    try:
        reports = [_report(name, size) for name in args.part or PARTS]
    except KeyboardInterrupt:
        print("interrupted; the server has ended", file=sys.stderr)
        return _INTERRUPTED
    return 0 if all(reports) else _MISSED


def _report(name: str, size: Size) -> bool:
    """Run one part; True if it keeps its bounds."""
    checks = list(PARTS[name](size))
    print(f"{name}:", *lines(checks), "", sep="\n", flush=True)
    return all(check.is_met for check in checks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.soak",
        description="Starts a server for each part, loads it, and reports how it held up. "
        "Exits with 1 if a bound is missed. Linux only: it reads /proc.",
    )
    parser.add_argument("part", nargs="*", type=_part, help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--clients", type=int, default=_DEFAULT.num_leaving, help="that leave")
    parser.add_argument("--seconds", type=float, default=_DEFAULT.flood_time, help="of overload")
    parser.add_argument(
        "--low", type=int, default=_DEFAULT.num_low, help="low-priority requests beside others"
    )
    parser.add_argument(
        "--minutes", type=float, default=_DEFAULT.long_time / 60, help="of mixed load"
    )
    parser.add_argument(
        "--warm-up", type=float, default=_DEFAULT.warm_up / 60, help="minutes before"
    )
    parser.add_argument("--seed", type=int, default=_DEFAULT.seed, help="of how clients leave")
    return parser


def _part(name: str) -> str:
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PARTS)}")
    return name


if __name__ == "__main__":
    sys.exit(main())

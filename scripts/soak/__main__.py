"""`python -m scripts.soak`: from the command line to the table."""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from scripts.soak.checks import lines
from scripts.soak.long_run import long_run

_MISSED: Final = 1
_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print what it shows; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.soak",
        description="Starts a server, loads it with a bit of everything, and reports how it held up. "
        "Exits with 1 if a bound is missed. Linux only: it reads /proc.",
    )
    parser.add_argument("--minutes", type=float, default=20, help="of mixed load")
    parser.add_argument("--warm-up", type=float, default=3, help="minutes before")
    args = parser.parse_args(argv)
    try:
        checks = list(long_run(60 * args.minutes, 60 * args.warm_up))
    except KeyboardInterrupt:
        print("interrupted; the server has ended", file=sys.stderr)
        return _INTERRUPTED
    print(*lines(checks), sep="\n")
    return 0 if all(check.is_met for check in checks) else _MISSED


if __name__ == "__main__":
    sys.exit(main())

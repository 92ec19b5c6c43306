"""`python -m kernels.microbench`: medians over repeats, and the tenths around them."""

import argparse
import sys
from collections.abc import Sequence

from batching.errors import ModelLoadError
from kernels.microbench.native import run_native
from scripts.machine import describe, in_words
from scripts.microbench.timing import FULL, QUICK


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.microbench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    args = parser.parse_args(argv)
    print(in_words(describe()))
    try:
        print(run_native(QUICK if args.quick else FULL))
    except ModelLoadError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

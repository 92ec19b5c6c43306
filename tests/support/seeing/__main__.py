"""Trains the model and writes its folder; see `tests.support.seeing`."""

import argparse
import os
import sys
from pathlib import Path
from typing import Final

# What part of held-out questions must be answered; who takes one of two images for the other has half at most.
REQUIRED: Final = {
    "text": 0.95,
    "colour": 0.95,
    "digit": 0.9,
    "count": 0.9,
    "colour of two": 0.6,
    "digit of two": 0.6,
    "count of two": 0.6,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.seeing", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder: Path = parser.parse_args().folder
    # Read when MLX is loaded: threads of BLAS that wait for each other are slow where others compute, too.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from tests.support.seeing.training import make

    reached = make(folder)
    return 0 if all(reached[kind] >= share for kind, share in REQUIRED.items()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""A server of which a rank never goes on, while its process lives; the other ranks wait for it in MLX."""

import os
import threading
from typing import Final, NoReturn

import batching.backend  # noqa: F401  # its BLAS has to come before MLX

# isort: split
from app.__main__ import start
from app.observability.logs import print_stderr
from batching.backend.runner.mlx_runner import MLXRunner

# Of the environment: which rank it is, and at what it stands still: the check at the load, or a step of rank 0.
STUCK: Final = "STUCK_RANK"
LOADING: Final = "loading"
STEP: Final = "step"
# What it says then.
LINE: Final = "it stands still"


def plant(at: str) -> None:
    """Let this process stand still."""
    if at == LOADING:
        MLXRunner.logits = _stand_still  # type: ignore[method-assign, assignment]
    else:
        MLXRunner.follow = _stand_still  # type: ignore[method-assign, assignment]


def _stand_still(*_: object) -> NoReturn:
    print_stderr(LINE)
    while True:
        threading.Event().wait()


if __name__ == "__main__":
    number, at = os.environ[STUCK].split()
    if number == os.environ["MLX_RANK"]:
        plant(at)
    start()

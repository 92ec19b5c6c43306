"""The entry point of `mlx-batch-server` and `python -m mlx_batch_server`."""

import sys
from pathlib import Path
from typing import NoReturn


def start() -> NoReturn:
    """Run the server; never returns."""
    # Before all other places, which may have an `app` of their own.  In a checkout they are where it is.
    sys.path.insert(0, str(Path(__file__).parent))
    from app.__main__ import start as start_app

    start_app()


if __name__ == "__main__":
    start()

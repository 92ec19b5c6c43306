"""`python -m scripts.gpu_check.child FUNCTION OPTIONS FILE`: one check, in this process."""

import json
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import monotonic

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx

from scripts.gpu_check.record import Options, Record, Skipped, Status


def main(argv: Sequence[str]) -> int:
    function, options_json, path = argv
    options = Options(**json.loads(options_json))
    # What a failed step logs is no failure of the check.
    logging.disable(logging.ERROR)
    mx.set_default_device(mx.Device(mx.cpu if options.device == "cpu" else mx.gpu))
    record = Record(path=Path(path), deadline=monotonic() + options.seconds)
    module, _, name = function.partition(":")
    try:
        getattr(import_module(module), name)(options, record)
        record.status = Status.PASS
    except Skipped as error:
        record.status = Status.SKIPPED
        record.notes.append(str(error))
    record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

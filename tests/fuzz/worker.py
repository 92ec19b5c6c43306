"""Runs targets, each input within limits of the system; the supervisor starts it and says why it ended.

python -m tests.fuzz.worker JOB
"""

import json
import logging
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from time import monotonic, process_time
from typing import Any, Final, Literal

from tests.fuzz.target import Target, Unavailable

Engine = Literal["atheris", "mutations", "replay"]

_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = resource.getpagesize()
# What reads a client's bytes; other libraries' branches would hide those of this project.
_INSTRUMENTED: Final = ["app", "batching", "h11", "python_multipart"]
# Of inputs that atheris changes: it has seen what they are compared with.
_SHARE_OF_ATHERIS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker does.

    corpora: files by the modules of their targets.
    seconds: how long they are fuzzed, all together.
    current: the file of the input that runs, should the process end of it.
    inputs: the folder of those that atheris keeps, and of the corpus.
    """

    corpora: Mapping[str, Sequence[str]]
    engine: Engine
    seconds: float
    current: str
    inputs: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Runner:
    """Runs inputs, each within the target's limits."""

    def __init__(self, target: Target, current: Path) -> None:
        self._target = target
        self._file = current.open("wb", buffering=0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def __call__(self, data: bytes) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(data)
        # Whatever it does then, also where no other thread of Python runs, the kernel ends this process.
        _limit(resource.RLIMIT_CPU, int(process_time()) + 1 + self._target.cpu_seconds)
        with suppress(FileNotFoundError):
            # A Mac has no such limit.
            pages = int(_STATM.read_text().split()[0])
            _limit(resource.RLIMIT_AS, pages * _PAGE_BYTES + self._target.memory_bytes)
        try:
            self._target.run(data)
        except SystemExit as error:
            raise RuntimeError("it ends the process") from error
        finally:
            _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
            _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)


def _limit(kind: int, amount: int) -> None:
    """Set a soft limit, which may be raised again; with RLIM_INFINITY it is the hard one."""
    _, hard = resource.getrlimit(kind)
    finite = [limit for limit in (amount, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(finite, default=resource.RLIM_INFINITY), hard))


def replay(run: Runner, paths: Iterable[Path]) -> None:
    for path in paths:
        run(path.read_bytes())


def mutate(run: Runner, target: Target, paths: Iterable[Path], seconds: float) -> None:
    """Run changed inputs of the corpus; nothing tells which of them reach what no other has."""
    corpus = [path.read_bytes() for path in paths]
    rng = Random()
    end = monotonic() + seconds
    count = 0
    while monotonic() < end:
        run(target.mutate(rng.choice(corpus), rng, target.max_bytes))
        count += 1
    sys.stdout.write(f"{count} inputs\n")


def search(
    atheris: Any, run: Runner, target: Target, paths: Iterable[Path], folder: Path, seconds: float
) -> None:
    """Keep the inputs that reach new branches, in the folder, and change those; does not return."""
    for path in paths:
        shutil.copy(path, folder)

    def change(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < _SHARE_OF_ATHERIS:
            return bytes(atheris.Mutate(data, max_bytes))
        return target.mutate(data, rng, max_bytes)

    options = {
        "max_total_time": int(seconds),
        "max_len": target.max_bytes,
        # The limits of this process are in force, and the supervisor.
        "rss_limit_mb": 0,
        "timeout": 3600,
        "artifact_prefix": f"{folder}/",
        "verbosity": 0,
        "print_final_stats": 1,
    }
    arguments = [sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), str(folder)]
    atheris.Setup(arguments, run, custom_mutator=change)
    atheris.Fuzz()


def main(job: Job) -> None:
    # What is rejected is logged, a hundred times a second.
    logging.disable()
    atheris: Any = import_module("atheris") if job.engine == "atheris" else None
    for module, names in job.corpora.items():
        try:
            with atheris.instrument_imports(include=_INSTRUMENTED) if atheris else nullcontext():
                target: Target = import_module(module).TARGET
        except Unavailable as error:
            sys.stdout.write(f"{module} is left out: {error}\n")
            continue
        sys.stdout.write(f"{module}\n")
        sys.stdout.flush()
        run, paths = Runner(target, Path(job.current)), [Path(name) for name in names]
        match job.engine:
            case "atheris":
                search(atheris, run, target, paths, Path(job.inputs), job.seconds)
            case "mutations":
                mutate(run, target, paths, job.seconds / len(job.corpora))
            case "replay":
                replay(run, paths)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))

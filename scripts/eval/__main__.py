"""`python -m scripts.eval PYTHON FOLDER`: scores of the server beside those of plain mlx-lm.

lm-evaluation-harness asks the server over HTTP, in several modes, and plain mlx-lm and llama.cpp without it, with
the same tasks, weights and tokens.  PYTHON is the interpreter of the harness's environment; FOLDER gets
the results.  The MLX_SERVER_* settings of the environment apply.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import httpx

from batching.backend.loader import resolve
from scripts.eval.results import TASKS, Run, table
from scripts.guidellm import save_tokenizer
from scripts.machine import describe, in_words
from scripts.server_process import MODEL, ROOT, Server, ServerFailed, environment_settings


class Mode(NamedTuple):
    """Settings, and how far scores may be from plain mlx-lm's: see `Run.change`."""

    settings: Mapping[str, str]
    most: float


MODES: Final[Mapping[str, Mode]] = {
    "exact": Mode({"cpu_precision": "exact"}, 0.005),
    "default": Mode({"cpu_precision": "auto"}, 0.03),
    "exact, int8 pool": Mode({"cpu_precision": "exact", "kv_cache_dtype": "int8"}, 0.03),
    "default, int8 pool": Mode({"cpu_precision": "auto", "kv_cache_dtype": "int8"}, 0.03),
}
# Everything is on this machine; the hub would be asked whether it has newer files.
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# Threads of OpenBLAS spin while they wait for each other: on a busy machine two take ten times as long as one.
_DEFAULTS: Final = {"OPENBLAS_NUM_THREADS": "1"}
_EPILOG: Final = """\
llama.cpp is measured if PYTHON has llama-cpp-python, which its installation compiles for minutes, and the
model is a GGUF file.  The exit status is 1 if a mode is further from plain mlx-lm than it may be.
"""


class HarnessFailed(Exception):
    """The harness ended with an error; the text is the end of its log."""


@dataclass(frozen=True, slots=True)
class Harness:
    """lm-evaluation-harness in an environment of its own; results and logs go into `folder`."""

    python: str
    folder: Path
    limit: int | None

    def has(self, package: str) -> bool:
        command = [self.python, "-c", f"import {package}"]
        return subprocess.run(command, capture_output=True).returncode == 0

    def run(self, name: str, module: str, model: str, model_args: Mapping[str, object]) -> Run:
        """Run all tasks, as a user would on the command line, which is printed.

        Raises:
            HarnessFailed: it ended with an error.
        """
        folder = self.folder / name.replace(", ", "-").replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        args = ",".join(f"{key}={value}" for key, value in model_args.items())
        command = [self.python, "-m", module, "run", "--model", model, "--model_args", args]
        command += ["--tasks", ",".join(TASKS), "--include_path", "scripts/eval/tasks"]
        command += ["--output_path", str(folder), "--log_samples"]
        command += [] if self.limit is None else ["--limit", str(self.limit)]
        print(f"{name}: {' '.join(command)}", file=sys.stderr, flush=True)
        log = folder / "log.txt"
        with log.open("wb") as output:
            status = subprocess.call(
                command,
                cwd=ROOT,
                env=_DEFAULTS | os.environ | _OFFLINE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if status != 0:
            raise HarnessFailed(f"{name}: {log.read_text(errors='replace')[-2000:]}")
        return Run.read(name, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print a table; return 1 if scores differ by more than they may, 2 if something fails."""
    args = _arguments(argv)
    harness = Harness(args.python, args.folder.resolve(), args.limit)
    settings = {"generation_config": "openai"} | environment_settings()
    try:
        runs = list(_runs(harness, settings, args.mode or list(MODES)))
    except (HarnessFailed, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 2
    print(in_words(describe()), "", *table(runs), sep="\n")
    off = list(too_far(runs))
    print(*off, sep="\n", file=sys.stderr)
    return int(bool(off))


def too_far(runs: Sequence[Run]) -> Iterator[str]:
    """Name the modes of the server whose scores are further from the first run's than they may be."""
    for run in runs:
        if run.name in MODES and (change := run.change(runs[0])) > MODES[run.name].most:
            yield f"{run.name}: {change:.2%} off, {MODES[run.name].most:.1%} at most"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval", description=__doc__, epilog=_EPILOG
    )
    parser.add_argument("python", help="the interpreter that has lm-evaluation-harness")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", action="append", choices=MODES, help="repeatable; default: all")
    parser.add_argument("--limit", type=int, help="so many items of each task")
    return parser.parse_args(argv)


def _runs(harness: Harness, settings: dict[str, Any], modes: Sequence[str]) -> Iterator[Run]:
    reference = settings.get("model", MODEL)
    yield harness.run("mlx-lm", "scripts.eval.plain", "plain-mlx-lm", {"model": reference})
    for name in modes:
        yield _run_server(harness, name, reference, {**settings, **MODES[name].settings})
    if (path := resolve(reference)).suffix == ".gguf" and harness.has("llama_cpp"):
        yield harness.run("llama.cpp", "scripts.eval.llama_cpp", "llama-cpp", {"model": path})


def _run_server(harness: Harness, name: str, model: str, settings: dict[str, Any]) -> Run:
    with TemporaryDirectory() as tokenizer, Server(**settings) as server:
        save_tokenizer(model, Path(tokenizer))
        (card, *_) = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
        model_args = {
            "model": card["id"],
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 8,
        }
        return harness.run(name, "lm_eval", "local-completions", model_args)


if __name__ == "__main__":
    sys.exit(main())

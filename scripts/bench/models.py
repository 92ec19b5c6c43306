"""`python -m scripts.bench.models FOLDER`: the benchmark on random weights in published shapes.

Each shape is measured with one client, with 8, and with a prompt of 880 tokens, beside llama.cpp
if its `llama-server` is installed or beside the peers of the command line.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from batching.backend.processor.cores import usable_cores
from batching.model_files.gguf_header import read_header
from scripts.bench.cli import Options, parse
from scripts.bench.load.metrics import medians
from scripts.bench.load.servers import fleet
from scripts.bench.load.session import Outcome, run
from scripts.bench.load.signals import ended_by_signals, run_until_signal
from scripts.bench.report import as_json, remarks
from scripts.machine import describe, in_words
from scripts.make_model.__main__ import main as make_model
from scripts.make_model.shapes import SHAPES
from scripts.server_process import ServerFailed

_EPILOG: Final = """\
All other options are those of scripts.bench; in a --vs-command, {model} is the path of the GGUF
file.  A model that the folder has already is not made again.
"""
_LLAMA_CPP: Final = "llama-server -m {model} --port {port} -np 8 -c 16384 -t %d"
_LOADS: Final = (
    ("--scenario", "short", "--clients", "1,8"),
    ("--scenario", "long", "--clients", "1"),
)
# Of the three points of load: the column's title, the value and its unit in the value's.
_COLUMNS: Final = (
    (0, "1 client, tokens/s", "output_throughput", 1),
    (0, "ms a token", "tpot_p50_ms", 1),
    (1, "8 clients, tokens/s", "output_throughput", 1),
    (2, "prompt of 880 tokens, s", "ttft_p50_ms", 1000),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure shape by shape; return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.models", description=__doc__, epilog=_EPILOG
    )
    parser.add_argument("folder", type=Path, help="where the models are kept")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeatable; default: all")
    args, words = parser.parse_known_args(argv)
    words += [] if any(word.startswith("--vs") for word in words) else _llama_cpp()
    if (file := options_for(args.folder, words).json) == "-":
        parser.error("--json takes a file here: standard output has the table")
    results: dict[str, Any] = {"machine": (machine := describe())}
    print(in_words(machine), "", *_head(), sep="\n", flush=True)
    has_failed = False
    for name in args.shape or SHAPES:
        results[name] = _measure(name, args.folder / f"{name}.gguf", words)
        has_failed |= not _is_whole(results[name])
        if file is not None:
            Path(file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(has_failed)


def _is_whole(result: dict[str, Any]) -> bool:
    return result.get("num_failed") == 0


def options_for(path: Path, words: Sequence[str]) -> Options:
    """Return the options of a run with one model."""
    words = [word.replace("{model}", str(path)) for word in words]
    runs = [parse([*words, *load, "--ignore-eos"]) for load in _LOADS]
    first = runs[0]
    points = tuple(point for each in runs for point in each.plan.points)
    # Random weights repeat themselves, so that drafts by prompt lookup would be right too often.
    environment = {"MLX_SERVER_MODEL": str(path), "MLX_SERVER_MAX_DRAFT_TOKENS": "0"}
    return replace(
        first,
        plan=replace(first.plan, points=points),
        servers=tuple(
            replace(spec, environment={**spec.environment, **environment}) for spec in first.servers
        ),
    )


def _llama_cpp() -> list[str]:
    if shutil.which("llama-server") is None:
        print("llama-server is not installed: this server alone is measured", file=sys.stderr)
        return []
    return ["--vs-command", f"llama.cpp={_LLAMA_CPP % usable_cores().count}"]


def _measure(name: str, path: Path, words: Sequence[str]) -> dict[str, Any]:
    """Measure one shape, print its rows, and return all results."""
    options = options_for(path, words)
    try:
        if not path.exists():
            with redirect_stdout(sys.stderr):
                make_model([name, str(path)])
        with ended_by_signals(), fleet(options.servers) as targets:
            outcome = run_until_signal(run(options.plan, targets))
    except ServerFailed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return {"error": str(error)}
    print(*rows(_title(name, path), outcome), sep="\n", flush=True)
    print(*remarks(outcome), sep="\n", file=sys.stderr)
    return as_json(outcome, options.plan, targets, {})


def _title(name: str, path: Path) -> str:
    header = read_header(path)
    layers = header.integer(f"{header.text('general.architecture')}.block_count")
    return f"{name}, {layers} layers, {path.stat().st_size / 2**30:.1f} GiB"


def _head() -> tuple[str, str]:
    titles = ("shape", "server", *(title for _, title, _, _ in _COLUMNS))
    return _line(titles), _line(["---", "---", *("--:" for _ in _COLUMNS)])


def rows(title: str, outcome: Outcome) -> Iterator[str]:
    """Yield a row of the table for each server."""
    points = list(outcome.rounds.values())
    for server in points[0] if points else ():
        values = [medians(point[server]).values if server in point else {} for point in points]
        cells = [
            f"{values[at][value] / unit:.{2 if unit > 1 else 1}f}"
            if at < len(values) and value in values[at]
            else "-"
            for at, _, value, unit in _COLUMNS
        ]
        yield _line([title, server, *cells])
        title = ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())

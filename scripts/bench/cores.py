"""`python -m scripts.bench.cores`: what more threads bring, over HTTP, in alternating rounds.

This server is started once for each number of threads, with the MLX_SERVER_* settings of the
environment; 16 clients ask it at once.  The last column is the output of one thread (or of the
fewest that are measured) times as many.  The load generator needs a part of a core, too.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from batching.backend.processor.cores import usable_cores
from scripts.bench.cli import Options, parse
from scripts.bench.load.metrics import medians
from scripts.bench.load.servers import fleet
from scripts.bench.load.session import Outcome, run
from scripts.bench.load.signals import ended_by_signals, run_until_signal
from scripts.bench.report import as_json, remarks
from scripts.machine import describe, in_words
from scripts.server_process import ServerFailed

_EPILOG: Final = """\
All other options are those of scripts.bench, but for the servers.
"""
_NUM_CLIENTS: Final = 16
_BATCH_SIZE: Final = "MLX_SERVER_BATCH_MAX_BATCH_SIZE"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table; return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.cores", description=__doc__, epilog=_EPILOG
    )
    described = "separated by commas; default: 1, 2, 3, 4, then twice as many each"
    parser.add_argument("--threads", type=_counts, metavar="N[,N...]", help=described)
    args, words = parser.parse_known_args(argv)
    options = options_for(args.threads or default_counts(usable_cores().max_threads), words)
    if options.json == "-":
        parser.error("--json takes a file here: standard output has the table")
    machine = describe()
    try:
        with ended_by_signals(), fleet(options.servers, options.start_timeout) as targets:
            outcome = run_until_signal(run(options.plan, targets))
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    print(in_words(machine), "", *rows(outcome), sep="\n", flush=True)
    print(*remarks(outcome), sep="\n", file=sys.stderr)
    if options.json is not None:
        circumstances = {"machine": machine, "note": options.note}
        report = as_json(outcome, options.plan, targets, circumstances)
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(outcome.num_failed > 0 or not outcome.is_complete)


def default_counts(most: int) -> list[int]:
    """Return 1 to 4, then twice as many each, up to the most threads that run at once."""
    counts = [1, 2, 3, *(1 << n for n in range(2, most.bit_length()))]
    return sorted({*(count for count in counts if count <= most), most})


def options_for(counts: Sequence[int], words: Sequence[str]) -> Options:
    """Return the options of a run with a server for each number of threads."""
    options = parse(["--clients", str(_NUM_CLIENTS), *words])
    ours, *peers = options.servers
    if peers or not ours.command:
        raise SystemExit("the servers that are measured are those of each number of threads")
    batch_size = {_BATCH_SIZE: os.environ.get(_BATCH_SIZE, str(_NUM_CLIENTS))}
    return replace(
        options,
        servers=tuple(
            replace(
                ours,
                name=f"{count} thread{'s' * (count > 1)}",
                environment={
                    **ours.environment,
                    **batch_size,
                    "MLX_SERVER_CPU_THREADS": str(count),
                },
            )
            for count in counts
        ),
    )


def rows(outcome: Outcome) -> Iterator[str]:
    """Yield the table in Markdown: medians of each number of threads, and their ratio to the first."""
    yield "| load | threads | output tokens/s | TTFT p50, s | ITL p99, ms | times the first |"
    yield "| --- | --: | --: | --: | --: | --: |"
    for point, by_server in outcome.rounds.items():
        first: float | None = None
        for server, rounds in by_server.items():
            values = medians(rounds).values
            output = values.get("output_throughput", 0.0)
            first = first or output
            cells = [
                f"{output:.0f}",
                f"{values.get('ttft_p50_ms', 0.0) / 1000:.2f}",
                f"{values.get('itl_p99_ms', 0.0):.0f}",
                f"{output / first:.2f}" if first else "-",
            ]
            yield f"| {' | '.join([point.title, server.split()[0], *cells])} |"


def _counts(text: str) -> list[int]:
    counts = sorted({int(part) for part in text.split(",")})
    if counts[0] < 1:
        raise argparse.ArgumentTypeError(f"{counts[0]} is no number of threads")
    return counts


if __name__ == "__main__":
    sys.exit(main())

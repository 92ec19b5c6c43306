"""From the command line to the reports."""

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

from scripts.bench.cli import Options, parse
from scripts.bench.export import Circumstances, as_json
from scripts.bench.machine import describe, in_words
from scripts.bench.server_process import ServerFailed
from scripts.bench.servers import Server, fleet
from scripts.bench.session import Outcome, run
from scripts.bench.steps import BadSteps, StepTime, load_steps
from scripts.bench.table import details, failures, overview
from scripts.bench.terminal import ProgressBar, console, show

_FAILED: Final = 1
_CANNOT_BEGIN: Final = 2
_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; return the exit status."""
    options = parse(argv)
    words = sys.argv[1:] if argv is None else argv
    circumstances = Circumstances(
        command=shlex.join(["python", "-m", "scripts.bench", *words]),
        started=datetime.now().astimezone().isoformat(timespec="seconds"),
        note=options.note,
        machine=describe(),
    )
    try:
        steps = load_steps(options.steps) if options.steps is not None else []
        with _ended_by_signals():
            outcome, servers = _measure(options)
    except (ServerFailed, BadSteps) as error:
        print(error, file=sys.stderr)
        return _CANNOT_BEGIN
    except KeyboardInterrupt:
        print("interrupted; the servers that were started have ended", file=sys.stderr)
        return _INTERRUPTED
    _report(outcome, options, servers, steps, circumstances)
    return _FAILED if outcome.num_failed or not outcome.is_complete else 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does, so that no server is left behind."""
    # A background job starts with SIGINT ignored, and asyncio knows the default handler only.
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: lambda *_: signal.raise_signal(signal.SIGINT),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _measure(options: Options) -> tuple[Outcome, list[Server]]:
    with fleet(options.servers, options.start_timeout) as servers:
        with ProgressBar(options.plan.num_requests * len(servers)) as progress:
            return asyncio.run(run(options.plan, servers, progress)), servers


def _report(
    outcome: Outcome,
    options: Options,
    servers: Sequence[Server],
    steps: Sequence[StepTime],
    circumstances: Circumstances,
) -> None:
    """Print the tables and write the files; tables make way for JSON on standard output."""
    out = console(sys.stderr if options.json == "-" else sys.stdout)
    tables = list(details(outcome, options.plan))
    summary = overview(outcome)
    lines = [*failures(outcome), *(f"note: {note}" for note in outcome.notes)]
    is_sweep = len(outcome.points) > len({point.scenario.name for point in outcome.points})
    shown = [] if is_sweep else tables
    out.print(in_words(circumstances.machine), highlight=False, markup=False, soft_wrap=True)
    out.print()
    show(out, [*shown, *([summary] if len(outcome.points) > 1 else [])], lines)
    if options.json is not None:
        told = as_json(
            outcome, options.plan, servers, circumstances, with_requests=options.json_requests
        )
        _write(json.dumps(told, indent=2) + "\n", options.json)
    if options.report is not None:
        # matplotlib takes a while to import, and is not needed for anything else.
        from scripts.bench.report import write_report

        write_report(options.report, outcome, steps, summary, tables, lines, circumstances)


def _write(text: str, file: str) -> None:
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")

"""`python -m scripts.bench`: from the command line to the results."""

import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from scripts.bench.cli import Options, parse
from scripts.bench.load.servers import Target, fleet
from scripts.bench.load.session import Outcome, run
from scripts.bench.load.signals import ended_by_signals, run_until_signal
from scripts.bench.report import as_json, remarks, table
from scripts.machine import describe, in_words
from scripts.server_process import ServerFailed

_FAILED: Final = 1
_CANNOT_BEGIN: Final = 2
_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; return the exit status."""
    options = parse(argv)
    words = sys.argv[1:] if argv is None else argv
    circumstances = {
        "command": shlex.join(["python", "-m", "scripts.bench", *words]),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": describe(),
    }
    try:
        with ended_by_signals(), fleet(options.servers) as targets:
            outcome = run_until_signal(run(options.plan, targets))
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return _CANNOT_BEGIN
    except KeyboardInterrupt:
        print("interrupted; the servers that were started have ended", file=sys.stderr)
        return _INTERRUPTED
    _report(outcome, options, targets, circumstances)
    return _FAILED if outcome.num_failed else 0


def _report(
    outcome: Outcome, options: Options, targets: Sequence[Target], circumstances: dict[str, Any]
) -> None:
    """Print the table and write the file; JSON on standard output takes the table's place."""
    out = sys.stderr if options.json == "-" else sys.stdout
    print(in_words(circumstances["machine"]), "", table(outcome), "", sep="\n", file=out)
    for line in remarks(outcome):
        print(line, file=out)
    if options.json is not None:
        text = json.dumps(as_json(outcome, options.plan, targets, circumstances), indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

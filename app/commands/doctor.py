"""`doctor`: what this machine lacks for the server, a line each."""

import argparse
from typing import Final

from app.commands.output import add_json, print_json

SUMMARY: Final = "check this machine and the settings, and load a model to try it"

_BAD: Final = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `doctor`."""
    parser.add_argument(
        "--no-self-test", action="store_true", help="load no model: takes a second instead of ten"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make all checks; return 1 if one is bad.

    Raises:
        CommandError: the settings are invalid.
    """
    from app.commands.health.checks import all_checks

    findings = []
    for finding in all_checks(has_self_test=not arguments.no_self_test):
        findings.append(finding)
        if not arguments.json:
            print(f"{finding.verdict:<4} {finding.name:<13} {finding.text}", flush=True)
    if arguments.json:
        print_json([finding._asdict() for finding in findings])
    return _BAD if any(not finding.is_good for finding in findings) else 0

"""Asks before something is deleted."""

import sys

from app.commands.errors import CommandError


def confirm(question: str) -> None:
    """Ask at the terminal.

    Raises:
        CommandError: the answer is not yes, or there is no one to ask.
    """
    if not sys.stdin.isatty():
        raise CommandError(f"{question} --yes says so, since no terminal is here to ask at")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing is deleted")

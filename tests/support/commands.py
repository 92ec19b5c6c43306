"""Runs a command of the terminal with arguments, as the program's own parser does."""

import argparse
from types import ModuleType


def parsed(command: ModuleType, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def run_command(command: ModuleType, *arguments: str) -> int:
    """Return the exit status."""
    status: int = command.run(parsed(command, *arguments))
    return status

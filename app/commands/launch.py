"""`launch`: starts a coding agent with the server as its model."""

import argparse
import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Final

from app.commands.errors import CommandError, RequestFailed
from app.commands.programs import PROGRAMS, Start, Target
from app.commands.server.models import Model, choose_model, takes_images
from app.commands.server.server_address import Server, add_server_arguments, find_server
from app.observability.logs import print_stderr
from app.settings.names import KEY_VARIABLE

SUMMARY: Final = "start a coding agent with the server as its model: " + ", ".join(PROGRAMS)

_END_OF_FLAGS: Final = "--"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launch`, which may also follow the program."""
    parser.usage = "%(prog)s PROGRAM [flags] [-- arguments of the program]"
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="PROGRAM", help=", ".join(PROGRAMS)
    )
    _add_flags(parser)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="model (default: the first of the server)")
    parser.add_argument(
        "--print",
        action="store_true",
        help=f"print the command for a shell instead; a key is shown as ${KEY_VARIABLE}",
    )
    parser.add_argument("--show-keys", action="store_true", help="print the key itself")
    parser.add_argument("--json", action="store_true", help="print it as a JSON object")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Become the program, or print how it is started; return the exit status.

    Raises:
        CommandError: the arguments are invalid, the program is not installed, or there is no server.
    """
    from app.commands.server.server_client import fetch_models

    name, extra = _parse(arguments)
    path = shutil.which(name)
    if path is None and not arguments.print:
        raise CommandError(f"{name} is not installed: {PROGRAMS[name].install}")
    server = find_server(arguments)
    try:
        target = _target(server, fetch_models(server), arguments.model)
    except RequestFailed as error:
        print_stderr(str(error))
        return 1
    start = PROGRAMS[name].start(target)
    command = [name, *start.arguments, *extra]
    if path is None or arguments.print:
        key = None if arguments.show_keys else server.api_key
        sys.stdout.write(f"{(_as_json if arguments.json else _as_shell)(command, start, key)}\n")
        return 0
    _warn_of_context(name, target)
    os.execve(path, command, _environment(start))
    return 0  # only where a test stands in for execve


def _parse(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the program and its own arguments; the flags that follow it are set in `arguments`.

    Raises:
        CommandError: there is no such program or flag.
    """
    known = ", ".join(PROGRAMS)
    if not arguments.command:
        raise CommandError(f"launch needs a program: {known}")
    name, *rest = arguments.command
    if name not in PROGRAMS:
        raise CommandError(f"launch knows no program {name!r}, but {known}")
    end = rest.index(_END_OF_FLAGS) if _END_OF_FLAGS in rest else len(rest)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_flags(parser)
    try:
        _, unknown = parser.parse_known_args(rest[:end], arguments)
    except argparse.ArgumentError as error:
        raise CommandError(f"launch: {error.argument_name}: {error.message}") from None
    if unknown:
        raise CommandError(f"launch: {unknown[0]} is no flag of launch; those of {name} follow --")
    if arguments.json and not arguments.print:
        raise CommandError("launch: --json needs --print")
    return name, rest[end + 1 :]


def _target(server: Server, models: Sequence[Model], name: str | None) -> Target:
    model = choose_model(models, name)
    return Target(
        server, name or model["id"], model.get("max_model_len"), takes_images=takes_images(model)
    )


def _warn_of_context(name: str, target: Target) -> None:
    needed = PROGRAMS[name].min_context
    if target.context is not None and target.context < needed:
        warning = f"{name} needs a context of {needed:,} tokens; {target.model} has "
        print_stderr(f"{warning}{target.context:,}", logging.WARNING)


def _environment(start: Start) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in start.removed}
    return {**kept, **start.variables}


def _as_shell(command: Sequence[str], start: Start, key: str | None) -> str:
    """Return a command for a shell; instead of the key it has a variable."""
    words = [
        f'{name}="${KEY_VARIABLE}"' if value == key else f"{name}={shlex.quote(value)}"
        for name, value in start.variables.items()
    ]
    if start.removed:
        words = ["env", *(f"-u {name}" for name in start.removed), *words]
    return " \\\n  ".join([*words, shlex.join(command)])


def _as_json(command: Sequence[str], start: Start, key: str | None) -> str:
    """Return a command as a JSON object; instead of the key it has the name of a variable."""
    shown = {n: f"${KEY_VARIABLE}" if v == key else v for n, v in start.variables.items()}
    found = {"command": [*command], "env": shown, "unset": [*start.removed]}
    return json.dumps(found, indent=2)

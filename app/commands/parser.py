"""The words of the command line: finds the module of one, and runs it.

Each module has a SUMMARY for the help, `add_arguments(parser)` and `run(arguments)`, which returns the exit
status: 0 is good, 1 is a bad answer, 2 is none.  What takes time to import, a module imports when it runs.
"""

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Final, NoReturn

from app import PROGRAM, __version__
from app.commands.errors import CommandError

_CANNOT_RUN: Final = 2
_KILLED_BY: Final = 128  # a shell's status of a process that a signal ended, less its number

# These read all settings as flags, and app.cli does that.
_OF_THE_SERVER: Final[Mapping[str, str]] = {
    "serve": "serve a model: what happens without a command",
    "run-batch": "serve the requests of a file, without a network",
}
MODULES: Final[Mapping[str, str]] = {
    "models": "app.commands.stored.models",
    "cache": "app.commands.stored.kv_cache",
    "ps": "app.commands.ps",
    "warm": "app.commands.warm",
    "chat": "app.commands.chat",
    "launch": "app.commands.launch",
    "doctor": "app.commands.doctor",
}
# As the modules have them, so that the help need not import these.
SUMMARIES: Final[Mapping[str, str]] = {
    **_OF_THE_SERVER,
    "models": "list, show, check, pull, export and remove models",
    "cache": "list, delete and check the keys and values that are kept on disk",
    "ps": "list the models that the server runs, with their memory and context",
    "warm": "put the prompts of a file into the prefix cache of the running server",
    "chat": "talk with a model in the terminal; with a text or a pipe, answer once",
    "launch": "start a coding agent with the server as its model: claude, codex, opencode, aider",
    "doctor": "check this machine and the settings, and load a model to try it",
}
_HELP: Final = ("-h", "--help")


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments; argparse would print its usage, too."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog}: {message.removeprefix('argument ')}")


def main(arguments: Sequence[str] = ()) -> int:
    """Run the command that is named first, and without one the server; return the exit status."""
    word = arguments[0] if arguments else ""
    if word in _OF_THE_SERVER or (word.startswith("-") and word not in (*_HELP, "--version")):
        return _serve(arguments)
    match word:
        case "":
            return _serve(arguments)
        case "--version":
            return _say(f"{PROGRAM} {__version__}")
        case "-h" | "--help":
            return _say(_help())
        case _:
            return _run(word, arguments[1:])


def _say(text: str) -> int:
    # A pager that is left reads no more.
    with suppress(BrokenPipeError):
        print(text, flush=True)
    return 0


def _serve(arguments: Sequence[str]) -> int:
    if arguments and arguments[-1] in _HELP:
        # The flags are all that it needs.
        from app.flags import serving_help

        return _say(serving_help(arguments[0]))
    from app.cli import main as serve

    return serve(arguments)


def _run(word: str, arguments: Sequence[str]) -> int:
    # Ends what runs as an exception; the handlers of before end the process with words about the server.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        module = _module(word)
        parser = _Parser(f"{PROGRAM} {word}", description=module.SUMMARY, allow_abbrev=False)
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(arguments)))
    except CommandError as error:
        print(error, file=sys.stderr)
    except SystemExit as ended:
        # The help has been printed.
        return int(ended.code or 0)
    except KeyboardInterrupt:
        return _KILLED_BY + signal.SIGINT
    except BrokenPipeError:
        return _KILLED_BY + signal.SIGPIPE
    return _CANNOT_RUN


def _module(word: str) -> ModuleType:
    if word not in MODULES:
        near = get_close_matches(word, SUMMARIES, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"{PROGRAM} --help lists them"
        raise CommandError(f"{PROGRAM}: there is no command {word}; {hint}")
    return import_module(MODULES[word])


def _help() -> str:
    width = max(map(len, SUMMARIES))
    return "\n".join(
        [
            f"usage: {PROGRAM} [command] [flags]",
            "",
            "OpenAI-compatible inference server on MLX. Without a command it serves.",
            "",
            "commands:",
            *(f"  {word:<{width}}  {summary}" for word, summary in SUMMARIES.items()),
            "",
            f"{PROGRAM} COMMAND --help says more; that of serve lists all settings.",
        ]
    )

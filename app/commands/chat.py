"""`chat`: a conversation in the terminal, or one answer for a pipe."""

import argparse
import io
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TextIO

from app.commands.errors import CommandError, RequestFailed
from app.commands.server.models import choose_model
from app.commands.server.server_address import Server, add_server_arguments, find_server
from app.observability.logs import print_stderr
from app.storage.disk.data_dir import default_state_dir

SUMMARY: Final = "talk with a model in the terminal; with a text or a pipe, answer once"

_STANDARD_INPUT: Final = "-"
_INTERRUPTED: Final = 128 + signal.SIGINT
_HISTORY: Final = "chat_history"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `chat`."""
    parser.add_argument(
        "text",
        nargs="*",
        metavar="TEXT",
        help="a message to answer; - stands for standard input, which follows the text",
    )
    parser.add_argument("--model", metavar="NAME", help="model (default: the first of the server)")
    parser.add_argument("--system", metavar="TEXT", default="", help="system message")
    parser.add_argument("--temperature", type=float, metavar="N", help="temperature of sampling")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument("--json", action="store_true", help="print the answer as a JSON object")
    parser.add_argument(
        "--no-history", action="store_true", help="keep no history of the lines that are entered"
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk, or answer once; return the exit status.

    Raises:
        CommandError: the arguments are invalid, or there is no server.
    """
    with _interruptible():
        try:
            message = _message(arguments.text)
            if message is None:
                return _talk(arguments)
            return _answer_once(arguments, message)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except RequestFailed as error:
            print_stderr(str(error))
        except BrokenPipeError:
            # Its reader has seen enough.
            pass
    return 1


def _message(words: list[str]) -> str | None:
    """Return the message of the command line and standard input; None asks for a conversation.

    Raises:
        CommandError: it is empty.
    """
    is_terminal = sys.stdin.isatty()
    if not words and is_terminal:
        return None
    texts = [" ".join(word for word in words if word != _STANDARD_INPUT)]
    if _STANDARD_INPUT in words or not is_terminal:
        texts.append(sys.stdin.buffer.read().decode(errors="replace"))
    if message := "\n\n".join(text.strip() for text in texts if text.strip()):
        return message
    raise CommandError("chat: there is no message: neither a text nor standard input has one")


def _talk(arguments: argparse.Namespace) -> int:
    from app.commands.conversation.lines import History, MessageReader
    from app.commands.conversation.screen import Screen
    from app.commands.conversation.session import Session

    if arguments.json:
        raise CommandError("chat: --json needs a message: a text, or - for standard input")
    server = find_server(arguments)
    model = _model(arguments, server)
    history = None if arguments.no_history else History(default_state_dir() / _HISTORY)
    session = Session(
        server,
        model,
        MessageReader(history),
        Screen(_tolerant(sys.stdout)),
        system=arguments.system,
        options=_options(arguments),
    )
    session.run()
    return 0


def _answer_once(arguments: argparse.Namespace, message: str) -> int:
    from app.commands.conversation.answer import Answer, receive

    server = find_server(arguments)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = [*system, {"role": "user", "content": message}]
    body = {**_options(arguments), "model": _model(arguments, server), "messages": messages}
    answer, out = Answer(), _Pipe(_tolerant(sys.stdout), is_silent=arguments.json)
    try:
        receive(server, body, answer, out, lambda: None)
    finally:
        out.end_line()
    if arguments.json:
        reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        found = {"model": answer.model, "content": answer.text, **reasoning}
        ended = {"finish_reason": answer.finish_reason, "usage": answer.usage}
        sys.stdout.write(f"{json.dumps(found | ended, indent=2)}\n")
    return 0


class _Pipe:
    """Writes the text of an answer and nothing else; silent, it writes nothing."""

    def __init__(self, out: TextIO, *, is_silent: bool) -> None:
        self._out = out
        self._is_silent = is_silent
        self._is_line_open = False

    def show_reasoning(self, text: str) -> None:
        """Leave it out."""

    def show_text(self, text: str) -> None:
        if not self._is_silent:
            self._out.write(text)
            self._out.flush()
            self._is_line_open = not text.endswith("\n")

    def end_line(self) -> None:
        if self._is_line_open:
            self._out.write("\n")
            self._out.flush()


def _model(arguments: argparse.Namespace, server: Server) -> str:
    from app.commands.server.server_client import fetch_models

    model = choose_model(fetch_models(server), arguments.model)
    return str(arguments.model or model["id"])


def _options(arguments: argparse.Namespace) -> Mapping[str, Any]:
    found = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    return {name: value for name, value in found.items() if value is not None}


def _tolerant(stream: TextIO) -> TextIO:
    """Return a stream that replaces characters which its encoding does not have."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return stream


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn Ctrl-C into KeyboardInterrupt; the entry point lets it end the process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

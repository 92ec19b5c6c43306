"""`warm`: puts the prompts of a file into the prefix cache of a running server."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.commands.errors import CommandError, RequestFailed
from app.commands.server.server_address import Server, add_server_arguments, find_server
from app.observability.logs import print_stderr

if TYPE_CHECKING:
    from app.batches.lines import Line

SUMMARY: Final = "put the prompts of a file into the prefix cache of the running server"

_BAD: Final = 1
_STDIN: Final = "-"
# The server says what is too large for it.
_MAX_LINE_BYTES: Final = 1 << 28
_PIECE: Final = 1 << 16
# How the server is asked to keep a prompt, unless its line says how.
_KEPT: Final = {"prompt_cache_key": "warm", "prompt_cache_retention": "24h"}


class Warmed(NamedTuple):
    """Tokens of prompts, those of them that were in the cache already, and the time that it took."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    seconds: float = 0.0

    def plus(self, other: "Warmed") -> "Warmed":
        return Warmed(
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_cached_tokens + other.num_cached_tokens,
            self.seconds + other.seconds,
        )

    def __str__(self) -> str:
        tokens, cached, seconds = self
        return f"{tokens} tokens, {cached} of them cached, {seconds:.1f} s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the flags of the server."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="chat requests, one JSON object a line, or lines of a batch; - is standard input",
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Send the lines; return the exit status.

    Raises:
        CommandError: the file cannot be read, or there is no server.
    """
    from app.batches.lines import BadLine

    server = find_server(arguments)
    total, num_warmed, num_failed = Warmed(), 0, 0
    for line in _lines(arguments.file):
        try:
            warmed = _warm(server, line)
        except (BadLine, RequestFailed) as error:
            print_stderr(f"line {line.number}: {error}")
            num_failed += 1
            continue
        print(f"line {line.number}: {warmed}", flush=True)
        total = total.plus(warmed)
        num_warmed += 1
    failed = f"; {num_failed} failed" if num_failed else ""
    print(f"{num_warmed} lines: {total}{failed}")
    return _BAD if num_failed else 0


def _lines(name: str) -> "Iterator[Line]":
    from app.batches.lines import read_pieces

    path = Path("/dev/stdin" if name == _STDIN else name)
    try:
        for piece in read_pieces(path, _MAX_LINE_BYTES, _PIECE):
            yield from piece.lines
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None


def _warm(server: Server, line: "Line") -> Warmed:
    """Send a line, as a stream: that says when the server is at work for long.

    Raises:
        BadLine: it is no request.
        RequestFailed: it was refused.
    """
    from app.commands.server.server_client import stream_chat
    from app.warming.lines import warming_body

    body = _KEPT | warming_body(line, _MAX_LINE_BYTES)
    body |= {"priority": "low", "stream_options": {"include_usage": True}}
    started, usage = monotonic(), dict[str, Any]()
    for chunk in stream_chat(server, body):
        usage = (chunk or {}).get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Warmed(
        usage.get("prompt_tokens", 0), details.get("cached_tokens", 0), monotonic() - started
    )

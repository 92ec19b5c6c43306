"""`ps`: which models a server runs."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from app.commands.errors import RequestFailed
from app.commands.output import size_text
from app.commands.server.models import Model, failure_of, progress_of, state_of
from app.commands.server.server_address import add_server_arguments, find_server
from app.observability.logs import print_stderr

SUMMARY: Final = "list the models that the server runs, with their memory and context"

_HEADINGS: Final = ("NAME", "STATE", "MEMORY", "STORED", "CONTEXT", "REQUESTS", "UNTIL")
# Only where a server keeps keys and values on disk.
_STORED: Final = _HEADINGS.index("STORED")
_UNKNOWN: Final = "-"
_MEBIBYTE: Final = 1 << 20
_GIBIBYTE: Final = 1 << 30
_MINUTE: Final = 60
_HOUR: Final = 3600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ps`."""
    parser.add_argument("--all", action="store_true", help="list the unloaded models too")
    parser.add_argument("--json", action="store_true", help="print the models as a JSON list")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the models; return the exit status."""
    from app.commands.server.server_client import fetch_models

    try:
        models = fetch_models(find_server(arguments))
    except RequestFailed as error:
        print_stderr(str(error))
        return 1
    shown = [model for model in models if arguments.all or _is_of_interest(model)]
    if arguments.json:
        text = json.dumps(shown, indent=2)
    else:
        text = "\n".join(table(shown, time.time())) if shown else _nothing(len(models))
    sys.stdout.write(f"{text}\n")
    return 0


def table(models: Sequence[Model], now: float) -> Iterator[str]:
    """Yield a table of models, then why some have failed to load; `now` is in seconds of Unix."""
    rows = [_HEADINGS, *(_row(model, now) for model in models)]
    if all(model.get("kv_store_bytes") is None for model in models):
        rows = [(*row[:_STORED], *row[_STORED + 1 :]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(cell.ljust(width) for cell, width in cells).rstrip()
    for model in models:
        if not model.get("parent") and (failure := failure_of(model)):
            yield f"{model['id']}: {' '.join(failure.split())}"


def _is_of_interest(model: Model) -> bool:
    return state_of(model) != "unloaded" or bool(failure_of(model))


def _nothing(num_models: int) -> str:
    others = f"; --all lists the {num_models} that can be" if num_models else ""
    return f"no model is loaded{others}"


def _row(model: Model, now: float) -> tuple[str, ...]:
    if model.get("parent"):
        # It has nothing of its own that counts here.
        return (f"  {model['id']}", *(_UNKNOWN for _ in _HEADINGS[1:]))
    context, in_flight = model.get("max_model_len"), model.get("in_flight")
    stored = model.get("kv_store_bytes")
    return (
        model["id"],
        _state(model),
        _memory(model),
        _UNKNOWN if stored is None else size_text(stored),
        _UNKNOWN if context is None else str(context),
        _UNKNOWN if in_flight is None else str(in_flight),
        _until(model, now),
    )


def _state(model: Model) -> str:
    if failure_of(model):
        return "failed"
    return f"{state_of(model)}{progress_of(model)}" or _UNKNOWN


def _memory(model: Model) -> str:
    """Return what a model takes in all: weights, KV cache and states."""
    memory = model.get("memory")
    if not memory:
        return _UNKNOWN
    num_bytes = sum(memory.values())
    if num_bytes < _GIBIBYTE:
        return f"{num_bytes / _MEBIBYTE:.0f} MiB"
    return f"{num_bytes / _GIBIBYTE:.1f} GiB"


def _until(model: Model, now: float) -> str:
    """Return when an idle model is unloaded."""
    if model.get("pinned"):
        return "pinned"
    expires_at = model.get("expires_at")
    if expires_at is None:
        return _UNKNOWN
    seconds = max(0, round(expires_at - now))
    if seconds < 2 * _MINUTE:
        return f"in {seconds} s"
    if seconds < 2 * _HOUR:
        return f"in {seconds // _MINUTE} min"
    return f"in {seconds // _HOUR} h"

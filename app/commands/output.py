"""Prints what a command answers: a table for people, or one JSON document."""

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON document")


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows with aligned columns, and their names above."""
    lines = [head, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def size_text(num_bytes: float) -> str:
    """Return a size as in `4.3 GiB` or `94 MiB`."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / 1024:.0f} KiB" if num_bytes >= 1024 else f"{num_bytes:.0f} bytes"

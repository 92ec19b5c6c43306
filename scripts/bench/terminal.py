"""What the person at the terminal sees: a progress bar, then tables."""

from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self, TextIO

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

from scripts.bench.table import Cell, Table

# Characters, where the output is no terminal that could say its own.
_WIDTH: Final = 160
# Times a second; drawing takes CPU from what is measured.
_REFRESH_RATE: Final = 2.0
_STYLES: Final = {None: "", True: "green", False: "red"}


class ProgressBar:
    """Shows on standard error which server gets which load, and how many requests are over."""

    def __init__(self, num_requests: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=_REFRESH_RATE,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=num_requests)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, title: str, num_requests_before: int) -> None:
        # A conversation that failed left requests out; the count catches up here.
        self._progress.update(self._task, description=title, completed=num_requests_before)

    def advance(self) -> None:
        self._progress.advance(self._task)


def console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _WIDTH)


def show(out: Console, tables: Iterable[Table], lines: Iterable[str]) -> None:
    """Print the tables, then what a reader should know."""
    for table in tables:
        # Not as the table's own title, which would wrap at the table's width.
        out.print(Text(table.title, style="bold"), soft_wrap=True)
        out.print(_rich(table))
        for line in table.footnotes:
            out.print(f"  {line}", style="dim", highlight=False, markup=False)
        out.print()
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def _rich(table: Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD)
    for number, title in enumerate(table.header):
        is_label = number < table.num_labels
        drawn.add_column(
            Text(title),
            justify="left" if is_label else "right",
            no_wrap=is_label,
            overflow="fold",
        )
    for row in table.rows:
        drawn.add_row(*map(_text, row))
    return drawn


def _text(cell: Cell) -> Text:
    return Text(cell.text, style=_STYLES[cell.is_better])

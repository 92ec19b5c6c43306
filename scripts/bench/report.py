"""A page of its own: the machine, the command, the tables, the charts; or the charts as a PNG."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from scripts.bench.export import Circumstances
from scripts.bench.machine import in_words
from scripts.bench.panels import GRID, INK, MUTED, PAPER, SERIES
from scripts.bench.pictures import Chart, svg, write_png
from scripts.bench.plots import charts
from scripts.bench.session import Outcome
from scripts.bench.steps import StepTime
from scripts.bench.table import Cell, Table

_DARK_SERIES: Final = ("#56b4e9", "#f28e4b", "#35c79b", "#e0a0c4", "#f0c043", "#c4d7e6")
_TONES: Final = {None: "", True: ' class="better"', False: ' class="worse"'}

# What the charts' colours are called on the page, so that they follow the reader's theme.
_VARIABLES: Final = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAPER: "--paper",
    **{color: f"--series-{number}" for number, color in enumerate(SERIES)},
}
_LIGHT: Final = {name: color for color, name in _VARIABLES.items()} | {
    "--better": "#00684b",
    "--worse": "#a33c00",
}
_DARK: Final = {
    "--ink": "#e8e8e8",
    "--muted": "#a5a5a5",
    "--grid": "#3a3a3a",
    "--paper": "#161618",
    "--better": "#35c79b",
    "--worse": "#f28e4b",
    **{f"--series-{number}": color for number, color in enumerate(_DARK_SERIES)},
}

_STYLE: Final = """
body { background: var(--paper); color: var(--ink); margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 2rem 0 .2rem; }
code { display: block; overflow-x: auto; border-left: 3px solid var(--grid); padding: .3rem .8rem; }
.muted, figcaption, small { color: var(--muted); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--grid); }
th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
.label { text-align: left; white-space: nowrap; }
.better { color: var(--better); } .worse { color: var(--worse); }
figure { margin: 2rem 0; } figure h3 { margin: 0; }
svg { width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
"""


def write_report(
    path: Path,
    outcome: Outcome,
    steps: Sequence[StepTime],
    overview: Table,
    details: Iterable[Table],
    lines: Iterable[str],
    circumstances: Circumstances,
) -> None:
    """Write the file that its suffix asks for; without any number there is no PNG."""
    shown = charts(outcome, steps)
    if path.suffix == ".png":
        write_png(shown, path)
        return
    parts = [
        _head(circumstances),
        _list(lines),
        _table(overview),
        "<h2>Charts</h2>",
        *map(_figure, shown),
        "<h2>All numbers</h2>",
        *map(_table, details),
    ]
    path.write_text(_page("\n".join(parts)), encoding="utf-8")


def _page(body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Serving benchmark</title>\n<style>\n:root {{ color-scheme: light dark; "
        f"{_declared(_LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ "
        f"{_declared(_DARK)} }} }}{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _declared(colors: dict[str, str]) -> str:
    return " ".join(f"{name}: {color};" for name, color in colors.items())


def _head(circumstances: Circumstances) -> str:
    note = f"<p>{escape(circumstances.note)}</p>" if circumstances.note else ""
    return (
        "<h1>Serving benchmark</h1>\n"
        f'<p class="muted">{escape(circumstances.started)}<br>'
        f"{escape(in_words(circumstances.machine))}</p>\n{note}\n"
        f"<code>{escape(circumstances.command)}</code>"
    )


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _figure(chart: Chart) -> str:
    picture = svg(chart)
    for color, name in _VARIABLES.items():
        picture = picture.replace(color, f"var({name})")
    picture = picture.replace("<svg ", f'<svg role="img" aria-label="{escape(chart.title)}" ', 1)
    return (
        f"<figure><h3>{escape(chart.title)}</h3>\n"
        f"<figcaption>{escape(chart.subtitle)}</figcaption>\n{picture}</figure>"
    )


def _table(table: Table) -> str:
    head = "".join(_cell("th", Cell(text), n, table) for n, text in enumerate(table.header))
    rows = "\n".join(
        f"<tr>{''.join(_cell('td', cell, n, table) for n, cell in enumerate(row))}</tr>"
        for row in table.rows
    )
    notes = "<br>\n".join(map(escape, table.footnotes))
    return (
        f'<h3>{escape(table.title)}</h3>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>'
        f"\n<tbody>\n{rows}\n</tbody>\n</table></div>\n<small>{notes}</small>"
    )


def _cell(tag: str, cell: Cell, number: int, table: Table) -> str:
    tone = ' class="label"' if number < table.num_labels else _TONES[cell.is_better]
    return f"<{tag}{tone}>{escape(cell.text)}</{tag}>"

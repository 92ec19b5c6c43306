"""Charts as pictures: SVG for a page, or one PNG of all."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matplotlib import rc_context
from matplotlib.figure import Figure, FigureBase

from scripts.bench.panels import MUTED, STYLE, Panel

# Inches and dots per inch.
_WIDTH: Final = 9.6
_TITLE: Final = 0.7
_DPI: Final = 150

_NO_METADATA: Final = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True, slots=True)
class Chart:
    """Panels side by side under a title; `height` is in inches."""

    title: str
    subtitle: str
    height: float
    panels: tuple[Panel, ...]

    def draw(self, figure: FigureBase) -> None:
        if not self.panels:
            return
        row = figure.subplots(1, len(self.panels), squeeze=False)[0]
        for axes, panel in zip(row, self.panels, strict=True):
            panel.draw(axes)
            named = self.panels[0].row_labels
            if panel is not self.panels[0] and named and panel.row_labels == named:
                axes.tick_params(axis="y", labelleft=False)


def svg(chart: Chart) -> str:
    """Return a chart as an element for a page, without its title, which the page writes."""
    with rc_context({**STYLE, "svg.hashsalt": chart.title}):
        figure = Figure(figsize=(_WIDTH, chart.height), layout="constrained")
        chart.draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    element = text.getvalue()
    element = element[element.index("<svg") :]
    # Numbered names would be there once in each chart of the page.
    return re.sub(r' id="[\w.]+_\d+"', "", element)


def write_png(shown: Sequence[Chart], path: Path) -> None:
    """Write all charts into one picture, one below the other."""
    heights = [chart.height + _TITLE for chart in shown]
    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        rows = figure.subfigures(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, chart in zip(rows, shown, strict=True):
            part.suptitle(chart.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
            part.supxlabel(chart.subtitle, x=0.01, ha="left", fontsize=8, color=MUTED)
            chart.draw(part)
        figure.savefig(path, format="png", dpi=_DPI, facecolor="white")

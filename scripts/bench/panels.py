"""Three kinds of panel: lines, bars, and ranges of percentiles; labelled directly, no legends.

Colours are names for a reader's theme: an HTML report puts its own in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from matplotlib.typing import RcKeyType

INK: Final = "#1a1a1a"
MUTED: Final = "#5f5f5f"
GRID: Final = "#dedede"
PAPER: Final = "#fffffe"
# Okabe and Ito's, which colour-blind readers tell apart.
SERIES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

# `Any` because matplotlib has settings of many types.
STYLE: Final[dict[RcKeyType, Any]] = {
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text: the page's font, and it can be searched
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 2,
    "lines.markersize": 5,
}

# Beyond this, small values could not be told from nothing on a linear axis.
_LINEAR_SPAN: Final = 20
# Client counts double as a rule, so their axis does too.
_DOUBLING_SPAN: Final = 8
_LABEL_POINTS: Final = 13


class Panel(Protocol):
    """One pair of axes; panels side by side that have the same rows name them once."""

    @property
    def row_labels(self) -> list[str]: ...

    def draw(self, axes: Axes) -> None: ...


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    color: str
    points: Sequence[tuple[float, float]]
    style: str = "-"
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines over the same few numbers, each with its name at its end."""

    title: str
    x_label: str
    lines: Sequence[Line]
    # Latencies may lie far apart; a throughput is seen best from zero.
    is_linear: bool = False

    @property
    def row_labels(self) -> list[str]:
        return []

    def draw(self, axes: Axes) -> None:
        axes.set_title(self.title)
        axes.set_xlabel(self.x_label)
        for line in self.lines:
            xs, ys = zip(*sorted(line.points), strict=True)
            axes.plot(xs, ys, line.style, color=line.color, alpha=line.alpha, marker="o")
        self._place_ticks(axes)
        values = [y for line in self.lines for _, y in line.points]
        _scale(axes, "y", [0.0, *values] if self.is_linear else values)
        self._label_ends(axes)

    def _place_ticks(self, axes: Axes) -> None:
        ticks = sorted({x for line in self.lines for x, _ in line.points})
        if ticks[0] > 0 and ticks[-1] / ticks[0] >= _DOUBLING_SPAN:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        axes.grid(visible=False, axis="x")

    def _label_ends(self, axes: Axes) -> None:
        """Write each name beside the end of its line, higher where it would cover another."""
        to_share = axes.transData + axes.transAxes.inverted()
        ends = sorted(
            (float(to_share.transform(max(line.points))[1]), number)
            for number, line in enumerate(self.lines)
        )
        gap = _LABEL_POINTS / (axes.get_window_extent().height / axes.figure.dpi * 72)
        lowest = float("-inf")
        for share, number in ends:
            lowest = max(share, lowest + gap)
            _write(axes, (1.0, lowest), self.lines[number])


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    color: str
    value: float


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars that lie, the first on top, each with its value at its end."""

    title: str
    bars: Sequence[Bar]

    @property
    def row_labels(self) -> list[str]:
        return [bar.label for bar in self.bars]

    def draw(self, axes: Axes) -> None:
        axes.set_title(self.title)
        values, colors = [bar.value for bar in self.bars], [bar.color for bar in self.bars]
        drawn = axes.barh(range(len(values)), values, color=colors, height=0.62)
        axes.bar_label(drawn, labels=[_plain(value) for value in values], padding=4)
        axes.margins(x=0.18)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)
        _name_rows(axes, self.row_labels)


@dataclass(frozen=True, slots=True)
class Range:
    label: str
    color: str
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Ranges:
    """A row for each range: a full dot for p50, a small one for p90, an open one for p99."""

    title: str
    ranges: Sequence[Range]

    @property
    def row_labels(self) -> list[str]:
        return [shown.label for shown in self.ranges]

    def draw(self, axes: Axes) -> None:
        axes.set_title(self.title)
        for place, shown in enumerate(self.ranges):
            color = shown.color
            axes.plot([shown.p50, shown.p99], [place, place], color=color, alpha=0.45)
            axes.plot([shown.p50], [place], "o", color=color, markersize=7)
            axes.plot([shown.p90], [place], "o", color=color, markersize=3.5)
            axes.plot([shown.p99], [place], "o", color=color, markersize=7, markerfacecolor=PAPER)
            _write_value(axes, shown.p50, place, "right")
            _write_value(axes, shown.p99, place, "left")
        _scale(axes, "x", [x for shown in self.ranges for x in (shown.p50, shown.p99)])
        axes.grid(visible=False, axis="y")
        _name_rows(axes, self.row_labels)


def series_color(number: int) -> str:
    return SERIES[number % len(SERIES)]


def _plain(value: float, _: object = None) -> str:
    """Write a number with three digits that mean something, and no exponent."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _write(axes: Axes, share: tuple[float, float], line: Line) -> None:
    axes.annotate(
        line.label,
        share,
        (6, 0),
        xycoords="axes fraction",
        textcoords="offset points",
        va="center",
        color=line.color,
        alpha=max(line.alpha, 0.6),
    )


def _write_value(axes: Axes, value: float, place: int, align: Literal["left", "right"]) -> None:
    """Write a value above its dot, to the side where the range is not."""
    axes.annotate(
        _plain(value),
        (value, place),
        (-4 if align == "right" else 4, 5),
        textcoords="offset points",
        ha=align,
        fontsize=8,
        color=MUTED,
    )


def _scale(axes: Axes, axis: Literal["x", "y"], values: Sequence[float]) -> None:
    """Begin at zero, or take a logarithmic scale if the values lie far apart."""
    lowest, highest = min(values), max(values)
    if 0 < lowest * _LINEAR_SPAN < highest:
        # Not left to matplotlib, which would choose only when it draws.
        axes.set(**{f"{axis}scale": "log", f"{axis}lim": (lowest / 1.6, highest * 1.6)})
    else:
        axes.set(**{f"{axis}lim": (0, highest * 1.12 or 1)})
    scaled = axes.xaxis if axis == "x" else axes.yaxis
    scaled.set_major_formatter(FuncFormatter(_plain))
    scaled.set_minor_formatter(NullFormatter())


def _name_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)

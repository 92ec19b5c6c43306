"""Draws what `python -m scripts.bench --json` wrote: `python -m scripts.bench.plot JSON PICTURE`.

A sweep over numbers of clients becomes lines, throughput and latency against clients; any other run
becomes bars, the output of each server under each load.  The suffix decides the format: .png, .svg.

    make bench BENCHFLAGS="--clients 1,2,4,8,16,32 --json clients.json"
    python -m scripts.bench.plot clients.json docs/assets/clients.png
    make bench BENCHFLAGS="--scenario short --scenario mixed --vs URL --json servers.json"
    python -m scripts.bench.plot servers.json docs/assets/servers.png
"""

import json
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Results = list[dict[str, Any]]

# Okabe and Ito's, which colour-blind readers can distinguish.
_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Bars: this server, in one mode or several, and others.
_OURS, _OTHERS = ("#0072b2", "#3f97cb", "#86c0e4"), ("#8c8c8c", "#adadad", "#cccccc")
_MUTED: Final = "#666666"
_TITLE_WIDTH: Final = 38
# `Any` because matplotlib has settings of many types.
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.marker": "o",
    "svg.fonttype": "none",
}


def main(words: Sequence[str]) -> int:
    if len(words) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    source, picture = map(Path, words)
    draw(json.loads(source.read_text(encoding="utf-8")), picture)
    return 0


def draw(run: dict[str, Any], picture: Path) -> None:
    """Draw a run; results of which every request failed are left out."""
    results = [result for result in run["results"] if result["median"]["values"]]
    if not results:
        sys.exit("no request succeeded: nothing to draw")
    counts = {result["load"].get("num_clients") for result in results} - {None}
    is_sweep = len({result["scenario"] for result in results}) == 1 and len(counts) > 1
    with rc_context(_STYLE):
        figure = _lines(results) if is_sweep else _bars(results)
        machine, rounds = run["machine"], run["plan"]["rounds"]
        caption = f"{machine['cpu']}, {machine['cores']} cores; medians of {rounds} rounds"
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color=_MUTED)
        figure.savefig(picture, dpi=160, facecolor="white")


def _lines(results: Results) -> Figure:
    """Draw throughput and the latencies' medians and 99th percentiles, a color for each server."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    throughput, ttft, itl = figure.subplots(1, 3)
    for server, color in zip(_servers(results), cycle(_COLORS)):
        own = [result for result in results if result["server"] == server]
        _plot(throughput, own, "output_throughput", color=color, label=server)
        for axes, latency in ((ttft, "ttft"), (itl, "itl")):
            _plot(axes, own, f"{latency}_p50_ms", color=color, label=f"{server}, p50")
            _plot(axes, own, f"{latency}_p99_ms", color=color, label=f"{server}, p99", ls=":")
    titles = ("Output, tokens/s", "Time to first token, ms", "Inter-token latency, ms")
    ticks = sorted({result["load"]["num_clients"] for result in results})
    for axes, title in zip((throughput, ttft, itl), titles, strict=True):
        axes.set(title=title, xlabel="clients", xscale="log", ylim=(0, None))
        axes.set_xticks(ticks, map(str, ticks), minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(axis="y")
        axes.legend(fontsize=8)
    return figure


def _plot(axes: Axes, results: Results, name: str, **style: Any) -> None:
    known = [result for result in results if name in result["median"]["values"]]
    xs = [result["load"]["num_clients"] for result in known]
    axes.plot(xs, [result["median"]["values"][name] for result in known], **style)


def _bars(results: Results) -> Figure:
    """Draw a panel for each load, in it a bar for each server, this project's in color."""
    servers, loads = _servers(results), list(dict.fromkeys(map(_load, results)))
    ours, others = cycle(_OURS), cycle(_OTHERS)
    colors = {s: next(ours if s.startswith("ours") else others) for s in servers}
    size = (max(6.0, 3.6 * len(loads)), 1.9 + 0.36 * len(servers))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle("Output, tokens/s: more is better", x=0.01, ha="left", weight="bold")
    for axes, load in zip(figure.subplots(1, len(loads), squeeze=False)[0], loads, strict=True):
        found = {r["server"]: r["median"] for r in results if _load(r) == load}
        values = [found[s]["values"]["output_throughput"] if s in found else 0 for s in servers]
        bars = axes.barh(servers, values, color=list(colors.values()), height=0.7)
        axes.bar_label(bars, [_label(found.get(s)) for s in servers], padding=4)
        blank_lines = "\n" * (max(other.count("\n") for other in loads) - load.count("\n"))
        axes.set(title=load + blank_lines, xlim=(0, 1.25 * max(values)))
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelleft=load == loads[0])
    return figure


def _label(median: dict[str, Any] | None) -> str:
    if median is None:
        return "failed"
    text = f"{median['values']['output_throughput']:.0f}"
    if median["num_failed"]:
        text += f" ({median['num_failed']} of {median['num_requests']} failed)"
    return text


def _servers(results: Results) -> list[str]:
    return list(dict.fromkeys(result["server"] for result in results))


def _load(result: dict[str, Any]) -> str:
    return f"{result['load']['label']}\n{fill(result['description'], _TITLE_WIDTH)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The figures as a table in Markdown."""

from collections.abc import Iterable, Sequence

from scripts.simulation.records import Summary

HEAD = ("requests/s", "output tokens/s", "first token p50", "p99", "computed", "429")


def cells(summary: Summary) -> list[str]:
    """Return the figures of a run, as `HEAD` names them."""
    return [
        f"{summary.requests_per_second:,.1f}",
        f"{summary.output_per_second:,.0f}",
        f"{summary.first_p50:.2f} s",
        f"{summary.first_p99:.2f} s",
        f"{summary.computed:.1%}",
        f"{summary.num_rejections:,}",
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are as wide as the widest of their column."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        f"| {' | '.join(c.ljust(w) for c, w in zip(line, widths, strict=True))} |"
        for line in (head, rule, *lines[1:])
    )

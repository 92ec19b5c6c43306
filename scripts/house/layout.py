"""Where the boxes of a floor stand, and which way its arrows take between them.

Boxes stand in rows, each above all that it imports (Sugiyama et al. 1981).  An arrow that passes
a row gets a lane there, which it shares with the other arrows to the same box.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from scripts.house.boxes import Floor

BOX_WIDTH: Final = 184
BOX_GAP: Final = 20
LANE_GAP: Final = 11
SWEEPS: Final = 24


@dataclass(frozen=True)
class Lane:
    """A place in a row where arrows to a box pass."""

    target: str
    row: int


Node = str | Lane


@dataclass(frozen=True)
class Layout:
    """The nodes of each row from left to right, their centres, and the links between neighbouring rows.

    Centres are between 0 and `width`.
    """

    rows: list[list[Node]]
    centres: dict[Node, float]
    links: list[tuple[Node, Node]]
    width: float

    def row_of(self) -> dict[Node, int]:
        """Return the index of each node's row."""
        return {node: index for index, row in enumerate(self.rows) for node in row}


def laid_out(floor: Floor) -> Layout:
    """Find orders of the rows in which few arrows cross, in no more room than the widest row takes."""
    rows, links = _with_lanes(floor)
    width = max(_offsets(row)[-1] + _half(row[0]) + _half(row[-1]) for row in rows)
    best = found = _layout(rows, links, width)
    for sweep in range(SWEEPS):
        found = _layout(_reordered(found, down=sweep % 2 == 0), links, width)
        best = min(best, found, key=_cost)
    return best


def _with_lanes(floor: Floor) -> tuple[list[list[Node]], list[tuple[Node, Node]]]:
    """Return the rows with lanes, and links that go from one row to the next."""
    row_of = {name: index for index, row in enumerate(floor.rows) for name in row}
    rows: list[list[Node]] = [list(row) for row in floor.rows]
    links: dict[tuple[Node, Node], None] = {}
    for name, targets in sorted(floor.arrows.items()):
        for target in sorted(targets):
            lanes = [Lane(target, row) for row in range(row_of[name] + 1, row_of[target])]
            for lane in lanes:
                if lane not in rows[lane.row]:
                    rows[lane.row].append(lane)
            way: list[Node] = [name, *lanes, target]
            links |= dict.fromkeys(pairwise(way))
    return rows, list(links)


def _neighbours(links: Sequence[tuple[Node, Node]]) -> dict[Node, list[Node]]:
    found: dict[Node, list[Node]] = {}
    for upper, lower in links:
        found.setdefault(upper, []).append(lower)
        found.setdefault(lower, []).append(upper)
    return found


def _layout(rows: list[list[Node]], links: list[tuple[Node, Node]], width: float) -> Layout:
    """Move the nodes towards the middle of those that they are linked with, in the order that they have."""
    neighbours = _neighbours(links)
    centres = {node: width / 2 for row in rows for node in row}
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 else reversed(rows):
            wishes = [fmean(centres[n] for n in neighbours.get(node, [node])) for node in row]
            centres |= dict(zip(row, _placed(row, wishes, width), strict=True))
    return Layout(rows, centres, links, width)


def _half(node: Node) -> float:
    return BOX_WIDTH / 2 if isinstance(node, str) else 0


def _offsets(row: list[Node]) -> list[float]:
    """Return how far each centre is at least from the first one."""
    offsets = [0.0]
    for left, right in pairwise(row):
        gap = BOX_GAP if isinstance(left, str) and isinstance(right, str) else LANE_GAP
        offsets.append(offsets[-1] + _half(left) + gap + _half(right))
    return offsets


def _placed(row: list[Node], wishes: list[float], width: float) -> Iterator[float]:
    """Yield centres near those wished for, in this order and apart: an isotonic regression."""
    offsets = _offsets(row)
    blocks: list[list[float]] = []
    for wish, offset in zip(wishes, offsets, strict=True):
        blocks.append([wish - offset])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    starts = [fmean(block) for block in blocks for _ in block]
    highest = width - _half(row[-1]) - offsets[-1]
    for start, offset in zip(starts, offsets, strict=True):
        yield offset + max(_half(row[0]), min(highest, start))


def _reordered(layout: Layout, down: bool) -> list[list[Node]]:
    """Sort each row by where its nodes are linked to in the row before, from above or from below."""
    before: dict[Node, list[float]] = {}
    for upper, lower in layout.links:
        node, other = (lower, upper) if down else (upper, lower)
        before.setdefault(node, []).append(layout.centres[other])
    return [
        sorted(row, key=lambda node: fmean(before.get(node, [layout.centres[node]])))
        for row in layout.rows
    ]


def _cost(layout: Layout) -> tuple[int, float]:
    """Return how many links cross, and how far links lead to the side."""
    row_of = layout.row_of()
    spans = [(row_of[a], layout.centres[a], layout.centres[b]) for a, b in layout.links]
    crossings = sum(
        (a - c) * (b - d) < 0
        for index, (row, a, b) in enumerate(spans)
        for other, c, d in spans[:index]
        if row == other
    )
    return crossings, sum(abs(a - b) for _, a, b in spans)

"""Draws one floor: its frame, its boxes, and the arrows between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap
from typing import Final

from scripts.house.boxes import Box, Floor
from scripts.house.layout import BOX_WIDTH, Layout, Node, laid_out
from scripts.house.svg import head, path, rectangle, text

PADDING: Final = 18
LINE: Final = 14
ROW_GAP: Final = 32
# As wide fonts have it: in a box, and for the text of a frame.
LINE_CHARACTERS: Final = 27
CHARACTER_WIDTH: Final = 7
PORT_DISTANCE: Final = 20


@dataclass(frozen=True)
class Drawing:
    """A floor with its name and what it is, before it has a place."""

    floor: Floor
    name: str
    about: str

    @cached_property
    def layout(self) -> Layout:
        """Where its boxes stand."""
        return laid_out(self.floor)

    @property
    def width(self) -> float:
        """The least width of its frame."""
        return self.layout.width + 2 * PADDING

    @cached_property
    def tops(self) -> list[float]:
        """Where each row begins from the frame's top, and where one more would."""
        tops: list[float] = [30 + LINE * len(self.about_lines()) + 12]
        for row in self.floor.rows:
            tallest = max(box_height(self.floor.boxes[name]) for name in row)
            tops.append(tops[-1] + tallest + ROW_GAP)
        return tops

    @property
    def height(self) -> float:
        """The height of its frame."""
        return self.tops[-1] - ROW_GAP + PADDING

    def about_lines(self) -> list[str]:
        """Return what stands below its name."""
        return wrap(self.about.replace("`", ""), int(self.width - 2 * PADDING) // CHARACTER_WIDTH)

    def elements(self, left: float, top: float, width: float, height: float) -> Iterator[str]:
        """Yield the floor in a frame of at least its size."""
        yield rectangle("floor", left, top, width, height, radius=10)
        yield text("name", left + PADDING, top + 24, self.name)
        for index, line in enumerate(self.about_lines(), start=1):
            yield text("", left + PADDING, top + 28 + LINE * index, line)
        origin = left + (width - self.layout.width) / 2
        yield from self._arrows(origin, top)
        for row, names in enumerate(self.floor.rows):
            for name in names:
                x = origin + self.layout.centres[name] - BOX_WIDTH / 2
                yield from _box(self.floor.boxes[name], x, top + self.tops[row])

    def _arrows(self, left: float, top: float) -> Iterator[str]:
        """Yield curves from row to row, and straight lines where an arrow passes a row."""
        ports = _ports(self.layout)
        row_of = self.layout.row_of()
        for upper, lower in self.layout.links:
            start, end = (left + x for x in ports[upper, lower])
            row = row_of[lower]
            below = top + self.tops[row]
            above, bend = below - ROW_GAP, below - ROW_GAP / 2 - 2
            begin = above
            if isinstance(upper, str):
                begin = top + self.tops[row - 1] + box_height(self.floor.boxes[upper])
            curve = f"C{start:.0f} {bend:.0f} {end:.0f} {bend:.0f} {end:.0f} {below - 4:.0f}"
            way = f"M{start:.0f} {begin:.0f}V{above:.0f}{curve}"
            if isinstance(lower, str):
                yield path("arrow", way)
                yield head("head", end, below)
            else:
                yield path("arrow", f"{way}V{top + self.tops[row + 1] - ROW_GAP:.0f}")


def box_height(box: Box) -> float:
    """Return the height of a box with its text."""
    return 30 + LINE * len(_box_lines(box)) + (LINE if "/" in box.title[:-1] else 0)


def _box_lines(box: Box) -> list[str]:
    return wrap(box.about.replace("`", ""), LINE_CHARACTERS)


def _box(box: Box, left: float, top: float) -> Iterator[str]:
    kind = "folder" if box.is_folder else "file"
    yield rectangle(kind, left, top, BOX_WIDTH, box_height(box), radius=5)
    parent, _, own = box.title[:-1].rpartition("/")
    y = top + 18
    if parent:
        yield text("", left + 9, y, f"{parent}/")
        y += LINE
    yield text("title", left + 9, y, own + box.title[-1])
    for index, line in enumerate(_box_lines(box), start=1):
        yield text("", left + 9, y + 2 + LINE * index, line)


def _ports(layout: Layout) -> dict[tuple[Node, Node], tuple[float, float]]:
    """Return where each link leaves its upper node and enters its lower one: side by side on a box."""
    leave: dict[tuple[Node, Node], float] = {}
    enter: dict[tuple[Node, Node], float] = {}
    for node in layout.centres:
        lower = [other for upper, other in layout.links if upper == node]
        upper = [other for other, lower in layout.links if lower == node]
        leave |= {(node, other): x for other, x in _spread(layout, node, lower)}
        enter |= {(other, node): x for other, x in _spread(layout, node, upper)}
    return {link: (leave[link], enter[link]) for link in layout.links}


def _spread(layout: Layout, node: Node, others: list[Node]) -> Iterator[tuple[Node, float]]:
    """Yield the other nodes from left to right, each with a place near the middle of this one."""
    distance = PORT_DISTANCE if isinstance(node, str) else 0
    for index, other in enumerate(sorted(others, key=lambda n: layout.centres[n])):
        yield other, layout.centres[node] + distance * (index - (len(others) - 1) / 2)

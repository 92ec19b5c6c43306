"""The whole picture: the floors, the arrows between them, and how to read it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Final

from scripts.house.boxes import Files, boxes_of
from scripts.house.drawing import LINE, Drawing
from scripts.house.rooms import Graph, floor, rooms
from scripts.house.sources import FLOORS, about, cpp_modules, imports, python_modules
from scripts.house.svg import document, head, path, text

ROOT: Final = Path(__file__).parent.parent.parent
HOUSE: Final = Path("docs", "architecture", "house.svg")
TITLE: Final = "The folders of the server and their imports"
MARGIN: Final = 16
GUTTER: Final = 40
KERNELS: Final = "kernels.mlx_cpu_kernels"
# Of the text beside the first floor.
NOTE_CHARACTERS: Final = 66
NOTES: Final = (
    """A solid box is a folder, which may have others in it. A dashed one is a file beside folders,
    or several of them. Each is described by its own first line.""",
    """An arrow leads to what is imported. An arrow that follows from others is left out.""",
)


@dataclass(frozen=True)
class Frame:
    """Where a floor is drawn."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.top + self.height


@cache
def picture() -> str:
    """Draw the house; the same source gives the same text."""
    files = python_modules(ROOT) | cpp_modules(ROOT)
    graph = rooms(imports(files, ROOT))
    drawings = {package: _drawing(package, graph, files) for package in FLOORS}
    frames = _frames(drawings)
    elements = [
        element
        for package, frame in frames.items()
        for element in drawings[package].elements(frame.left, frame.top, frame.width, frame.height)
    ]
    width = max(frame.right for frame in frames.values()) + MARGIN
    height = max(frame.bottom for frame in frames.values()) + MARGIN
    elements += [*_between(frames), *_notes(frames["app"].right + GUTTER, graph)]
    return document(width, height, TITLE, elements)


def _drawing(package: str, graph: Graph, files: Files) -> Drawing:
    first_line = about(files[package if package in files else KERNELS][0])
    return Drawing(boxes_of(package, graph, files), package.replace(".", "/") + "/", first_line)


def _frames(drawings: Mapping[str, Drawing]) -> dict[str, Frame]:
    """Put `batching` below `app`, the backend beside it, and the kernels below that."""
    app, batching, backend, kernels = (drawings[package] for package in FLOORS)
    second = MARGIN + app.height + GUTTER
    third = second + backend.height + GUTTER
    bottom = max(second + batching.height, third + kernels.height)
    right = MARGIN + batching.width + GUTTER
    width = max(backend.width, kernels.width)
    return {
        "app": Frame(MARGIN, MARGIN, app.width, app.height),
        "batching": Frame(MARGIN, second, batching.width, bottom - second),
        "batching.backend": Frame(right, second, width, backend.height),
        "kernels": Frame(right, third, width, bottom - third),
    }


def _between(frames: Mapping[str, Frame]) -> Iterator[str]:
    """Yield the arrows between floors."""
    app, batching, backend, kernels = (frames[package] for package in FLOORS)
    for upper, lower in ((app, batching), (backend, kernels)):
        x = lower.left + min(upper.width, lower.width) / 2
        yield path("between", f"M{x:.0f} {upper.bottom:.0f}V{lower.top - 6:.0f}")
        yield head("between-head", x, lower.top)
    down, up = backend.top + 90, backend.bottom - 90
    yield path("between", f"M{batching.right:.0f} {down:.0f}H{backend.left - 6:.0f}")
    yield head("between-head", backend.left, down, "right")
    yield path("between", f"M{backend.left:.0f} {up:.0f}H{batching.right + 6:.0f}")
    yield head("between-head", batching.right, up, "left")


def _notes(left: float, graph: Graph) -> Iterator[str]:
    """Yield the text beside the first floor: how to read the picture, and what crosses floors."""
    lines = [("name", TITLE)]
    for note in NOTES:
        lines += [("", ""), *(("", line) for line in wrap(" ".join(note.split()), NOTE_CHARACTERS))]
    for (importer, imported), names in sorted(_crossings(graph).items()):
        crossing = f"{importer}/ imports from {imported}/".replace(".", "/")
        lines += [("", ""), ("title", crossing)]
        lines += [("", line) for line in wrap(", ".join(sorted(names)), NOTE_CHARACTERS)]
    for index, (kind, line) in enumerate(lines):
        if line:
            yield text(kind, left, MARGIN + 24 + (LINE + 2) * index, line)


def _crossings(graph: Graph) -> dict[tuple[str, str], set[str]]:
    """Return for each two floors which rooms of the second the first one imports."""
    found: dict[tuple[str, str], set[str]] = {}
    for name, targets in graph.items():
        for target in targets:
            if (pair := (floor(name), floor(target)))[0] != pair[1]:
                short = target.removeprefix(pair[1]).removeprefix(".").replace(".", "/")
                found.setdefault(pair, set()).add(short or "__init__")
    return found

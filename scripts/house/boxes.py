"""The boxes of a floor: its folders, the files beside them, and the arrows between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

from scripts.house.rooms import Graph, floor, joined, reachable, reduced
from scripts.house.sources import about

# More boxes in a row are avoided where some of them can stand in a higher one.
ROW_SIZE: Final = 3

Files = Mapping[str, list[Path]]


@dataclass(frozen=True)
class Box:
    """A folder, a file, or several files, with what it is in a line."""

    title: str
    about: str
    is_folder: bool


@dataclass(frozen=True)
class Floor:
    """The boxes of a package, the arrows between them, and the rows that they stand in, from above."""

    boxes: dict[str, Box]
    arrows: Graph
    rows: list[list[str]]


def boxes_of(package: str, graph: Graph, files: Files) -> Floor:
    """Return a floor; the files above all folders are one box, and those below all folders another."""
    inside = {name for name in graph if floor(name) == package}
    folders = {name for name in inside if _is_folder(name, graph, files)}
    # A package that is no room is one only if its own module imports something.
    rooms = {n for n in inside if n in folders or not _is_package(n, files) or graph[n]}
    own = {name: graph[name] & rooms for name in rooms}
    groups = _groups(own, folders)
    arrows = reduced(joined(own, {n: names[0] for names in groups for n in names}))
    boxes = {n: _box(package, n, n in folders, files) for n in arrows}
    for names in groups:
        titles = [_title(package, name) or "__init__" for name in names]
        boxes[names[0]] = Box("files", ", ".join(titles), is_folder=False)
    return Floor(boxes, arrows, _rows(arrows))


def _is_package(name: str, files: Files) -> bool:
    return name in files and files[name][0].name == "__init__.py"


def _is_folder(name: str, graph: Graph, files: Files) -> bool:
    """Say whether a node is a package, with all of its modules."""
    has_modules = any(other.startswith(f"{name}.") for other in files)
    is_split = any(other.startswith(f"{name}.") for other in graph)
    return not is_split and (has_modules or _is_package(name, files))


def _groups(own: Graph, folders: set[str]) -> list[list[str]]:
    """Return the files that lead to no folder, and of the others those that no folder leads to."""
    beyond = reachable(own)
    below_folders = set().union(*(beyond[folder] for folder in folders))
    below = {name for name in own if not (beyond[name] | {name}) & folders}
    above = own.keys() - folders - below_folders - below
    return [sorted(names) for names in (above, below) if len(names) > 1]


def _title(package: str, name: str) -> str:
    return name.removeprefix(package).removeprefix(".").replace(".", "/")


def _box(package: str, name: str, is_folder: bool, files: Files) -> Box:
    title = _title(package, name) or "__init__"
    if is_folder:
        return Box(f"{title}/", _folder_about(name, files), is_folder)
    return Box(f"{title}{files[name][0].suffix}", about(files[name][0]), is_folder)


def _folder_about(name: str, files: Files) -> str:
    """Return what a folder's own module says, or one of its name in it, and its folders if it has several.

    Of a folder where neither says anything it is the names of its modules.
    """
    prefix = f"{name}."
    inside = [other.removeprefix(prefix) for other in files if other.startswith(prefix)]
    own = [module for module in (name, f"{prefix}{name.rpartition('.')[2]}") if module in files]
    if not own:
        return ", ".join(inside)
    folders = sorted({other.partition(".")[0] for other in inside if "." in other})
    line = about(files[own[0]][0])
    return f"{line} ({', '.join(folders)})" if len(folders) > 1 else line


def _rows(arrows: Graph) -> list[list[str]]:
    """Put each box above all that it imports; those that import nothing as high as they can stand."""
    height: dict[str, int] = {}
    for name in TopologicalSorter(arrows).static_order():
        height[name] = 1 + max((height[target] for target in arrows[name]), default=-1)
    ceiling = _ceilings(arrows, height)
    height |= {name: ceiling[name] for name, targets in arrows.items() if not targets}
    for row in range(max(height.values())):
        _relieve(row, height, ceiling)
    top = max(height.values())
    return [sorted(n for n in arrows if height[n] == top - row) for row in range(top + 1)]


def _ceilings(arrows: Graph, height: Mapping[str, int]) -> dict[str, int]:
    """Return how high each box can stand: below all that import it."""
    importers = {name: [other for other in arrows if name in arrows[other]] for name in arrows}
    return {
        name: min((height[other] - 1 for other in importers[name]), default=height[name])
        for name in sorted(arrows)
    }


def _relieve(row: int, height: dict[str, int], ceiling: Mapping[str, int]) -> None:
    """Move boxes of a row that has too many to the next higher rows that have room."""
    for name in sorted(n for n in height if height[n] == row < ceiling[n]):
        counts = [sum(other == h for other in height.values()) for h in range(ceiling[name] + 1)]
        free = [h for h in range(row + 1, ceiling[name] + 1) if counts[h] < ROW_SIZE]
        if counts[row] > ROW_SIZE and free:
            height[name] = free[0]

"""The picture of the house shows the imports that there are, and can be read."""

from itertools import combinations, pairwise
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

from scripts.house.boxes import Floor, boxes_of
from scripts.house.drawing import Drawing
from scripts.house.layout import BOX_WIDTH, laid_out
from scripts.house.picture import picture
from scripts.house.rooms import Graph, reduced, rooms
from scripts.house.sources import cpp_modules, imports, python_modules

SVG: Final = "{http://www.w3.org/2000/svg}"

FILES: Final = {
    "app/__init__.py": '"""The server."""',
    "app/main.py": '"""Starts."""\nimport app.api.chat',
    "app/names.py": '"""Names."""',
    "app/api/__init__.py": '"""All APIs.\n\nMore."""',
    "app/api/chat.py": "def run() -> None:\n    from app import names\n    import app.http.limits",
    "app/http/__init__.py": '"""Limits."""',
    "app/http/limits.py": 'import importlib\nimportlib.import_module("mlx_cpu_kernels")',
    "app/http/errors/__init__.py": "",
    "app/http/keys/key.py": "",
    "app/http/errors/status.py": "from app.names import NAME",
    "kernels/mlx_cpu_kernels/__init__.py": "",
    "kernels/src/pool.h": '// A pool.\n#include "memory.h"',
    "kernels/src/memory.h": "// Memory.",
    "kernels/src/memory.cpp": '#include "memory.h"\n#include "parts/part.h"',
    "kernels/src/parts/part.h": '// A part.\n#include "other.h"',
    "kernels/src/parts/other.h": "",
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[Path]]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return python_modules(tmp_path) | cpp_modules(tmp_path)


@pytest.fixture
def graph(files: dict[str, list[Path]], tmp_path: Path) -> Graph:
    return imports(files, tmp_path)


def graph_of(*edges: str) -> Graph:
    nodes = {name for edge in edges for name in edge.split()}
    targets = {name: {b for a, b in map(str.split, edges) if a == name} for name in nodes}
    return {name: frozenset(found) for name, found in targets.items()}


def test_every_kind_of_import_and_include_is_an_edge(graph: Graph) -> None:
    assert graph["app.main"] == {"app.api.chat"}
    assert graph["app.api.chat"] == {"app.names", "app.http.limits"}
    assert graph["app.http.limits"] == {"kernels.mlx_cpu_kernels"}
    assert graph["kernels.memory"] == {"kernels.parts.part"}
    assert graph["kernels.parts.part"] == {"kernels.parts.other"}


def test_a_folder_is_a_room_and_a_file_beside_folders_is_another(graph: Graph) -> None:
    found = rooms(graph)
    assert {name for name in found if name.startswith("app")} == {
        "app",
        "app.api",
        "app.http",
        "app.main",
        "app.names",
    }
    assert found["app.api"] == {"app.http", "app.names"}


def test_a_folder_that_would_make_a_circle_is_left_in_parts() -> None:
    found = rooms(graph_of("app.a.x app.b", "app.b app.a.y", "app.c.x app.c.y", "app.c.y app.b"))
    assert found == graph_of("app.a.x app.b", "app.b app.a.y", "app.c app.b")


def test_an_arrow_that_follows_from_others_is_left_out() -> None:
    assert reduced(graph_of("a b", "b c", "a c", "a d")) == graph_of("a b", "b c", "a d")


def test_boxes_have_the_first_lines_of_their_modules(
    graph: Graph, files: dict[str, list[Path]]
) -> None:
    floor = boxes_of("app", rooms(graph), files)
    described = {box.title: box.about for box in floor.boxes.values()}
    assert described["api/"] == "All APIs."
    assert described["http/"] == "Limits. (errors, keys)"
    assert described["main.py"] == "Starts."
    kernels = boxes_of("kernels", rooms(graph), files)
    assert kernels.boxes["kernels.memory"].about == "memory, pool"
    assert kernels.boxes["kernels.parts"].about == "other, part"


def test_files_above_and_below_all_folders_are_one_box_each(tmp_path: Path) -> None:
    names = ("app.cli", "app.main", "app.b.x", "app.c", "app.d")
    files = {name: [tmp_path / f"{name}.py"] for name in names}
    for paths in files.values():
        paths[0].write_text("", encoding="utf-8")
    found = rooms(graph_of("app.cli app.main", "app.main app.b.x", "app.b.x app.c", "app.c app.d"))
    floor = boxes_of("app", found, files)
    assert [[floor.boxes[n].about for n in row] for row in floor.rows] == [
        ["cli, main"],
        ["x"],
        ["c, d"],
    ]


def test_boxes_of_a_row_do_not_touch_and_stand_within_the_width() -> None:
    wide = {f"a{i}": frozenset({f"b{j}" for j in range(4) if j != i} | {"c"}) for i in range(4)}
    graph = wide | {f"b{i}": frozenset({"d"}) for i in range(4)} | graph_of("c d")
    layout = laid_out(Floor({}, graph, [[*wide], [f"b{i}" for i in range(4)], ["c"], ["d"]]))
    for row in layout.rows:
        boxes = [layout.centres[node] for node in row if isinstance(node, str)]
        assert all(right - left >= BOX_WIDTH for left, right in pairwise(boxes))
        assert all(BOX_WIDTH / 2 <= x <= layout.width - BOX_WIDTH / 2 for x in boxes)


def test_orders_with_fewer_crossings_are_found() -> None:
    crossed = graph_of("a z", "b y", "c x")
    layout = laid_out(Floor({}, crossed, [["a", "b", "c"], ["x", "y", "z"]]))
    places = [(layout.centres[a], layout.centres[b]) for a, b in layout.links]
    assert all((a - c) * (b - d) >= 0 for (a, b), (c, d) in combinations(places, 2))


def test_the_picture_is_an_svg_of_text_in_light_and_dark() -> None:
    root = ElementTree.fromstring(picture())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"app/", "batching/", "batching/backend/", "kernels/", "scheduling/"} <= {*texts}
    assert "prefers-color-scheme: dark" in picture()
    assert len(picture()) < 60_000


def test_a_frame_has_room_for_its_rows(graph: Graph, files: dict[str, list[Path]]) -> None:
    drawing = Drawing(boxes_of("app", rooms(graph), files), "app/", "The server.")
    assert drawing.height >= drawing.tops[-2]
    assert drawing.width >= BOX_WIDTH

"""Writes docs/model-types.md: how each model type of mlx-lm is served.

python -m scripts.model_types            checks a tiny model of each type, which takes about 20 s

tests/batching/backend/test_any_model.py says if a row is out of date.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from batching.backend.execution_mode import ExecutionMode
from batching.backend.hooks.changes import Changes
from batching.backend.paged.layout import CacheLayout, LayerShape, StateShape, leaves
from batching.backend.platforms.mlx import MLXPlatform
from batching.backend.self_check.check import check_model
from batching.backend.self_check.checked_model import CheckedModel
from scripts.generated_docs import ROOT, filled
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.model_zoo import CONFIGS, MODEL_TYPES, UNAVAILABLE, ZOO, make_tiny

MODEL_TYPES_PAGE: Final = Path("docs", "model-types.md")
MARKER: Final = "model types"

SERVED: Final = {
    ExecutionMode.RAGGED: "batched",
    ExecutionMode.PIECES: "batched, in pieces",
    ExecutionMode.ONE_BY_ONE: "batched but for its attention",
    ExecutionMode.WHOLE: "one at a time, on the pool",
    ExecutionMode.OWN: "one at a time, on its own caches",
}
# What depends on the device: a figure, and the words of MLX or of Python.
_VARYING: Final = re.compile(r" by [\d.e+-]+ of the largest one$| \(.*\)$", re.DOTALL)


def row(name: str, checked: CheckedModel) -> str:
    """Return the line of a type: how it is served, its caches, and why no faster way is right."""
    reason = _VARYING.sub("", checked.reason)
    kept = ", ".join(_kept(checked.layout))
    return _line(name, SERVED[checked.mode], kept, reason)


def _kept(layout: CacheLayout) -> Iterator[str]:
    found = list(leaves(layout.layers))
    shapes = layout.shapes
    if any(not (s.is_latent or s.is_gathered or s.is_shared) for s in shapes):
        yield "keys and values"
    if any(s.is_shared for s in shapes):
        yield "shared keys and values"
    if any(s.is_latent for s in shapes):
        yield "latents"
    if any(s.is_gathered for s in shapes):
        yield "gathered keys and values"
    if any(s.window and not s.is_chunked for s in shapes):
        yield "sliding windows"
    if any(s.is_chunked for s in shapes):
        yield "windows of chunks"
    if any(isinstance(leaf, StateShape) for leaf in found):
        yield "recurrent state"
    if any(not isinstance(leaf, LayerShape | StateShape) for leaf in found):
        yield "caches of its own"


def rows_on(page: str) -> dict[str, str]:
    """Return a line for each type of the page's table, by name."""
    found = {}
    for line in page.splitlines():
        if not line.startswith("| ") or "`" not in line:
            continue
        served, kept, names, reason = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.replace("`", "").split(", "):
            found[name] = _line(name, served, kept, reason)
    return dict(sorted(found.items()))


def _line(name: str, served: str, kept: str, reason: str) -> str:
    return f"| `{name}` | {served} | {kept} | {reason} |"


def summary(rows: dict[str, str]) -> str:
    """Return how many of the types are batched."""
    batched = [name for name in CONFIGS if rows[name].split(" | ")[1].startswith("batched")]
    tried = len(CONFIGS)
    return (
        f"mlx-lm has files for {len(MODEL_TYPES)} model types. {tried} of them run on a CPU, and of these "
        f"{len(batched)} ({100 * len(batched) / tried:.1f} %) are batched;\n"
        f"{tried - len(batched)} are served one request at a time. All have a prefix cache."
    )


def table(rows: dict[str, str]) -> str:
    """Return a line for all types that are served alike, those with the most types first."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(rows):
        _, *cells = (cell.strip() for cell in rows[name].strip("|").split("|"))
        alike.setdefault(tuple(cells), []).append(f"`{name}`")
    lines = ["| served | keeps | types | why not faster |", "| --- | --- | --- | --- |"]
    for (served, kept, reason), names in sorted(alike.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {served} | {kept} | {', '.join(names)} | {reason} |")
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    platform = MLXPlatform()
    rows = {
        name: row(name, check_model(make_tiny(name), VOCAB_SIZE, platform, Changes()))
        for name in ZOO
    }
    rows |= {name: _line(name, "not tried", "", why) for name, why in UNAVAILABLE.items()}
    content = f"{summary(rows)}\n\n{table(rows)}"
    path = ROOT / MODEL_TYPES_PAGE
    path.write_text(filled(path.read_text(encoding="utf-8"), MARKER, content), encoding="utf-8")


if __name__ == "__main__":
    main()

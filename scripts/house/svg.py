"""The elements of an SVG, in the classes of one style sheet for light and dark."""

from html import escape
from typing import Final

STYLE: Final = """
text { font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #57606a }
.sheet { fill: #ffffff }
.floor { fill: #f6f8fa; stroke: #d0d7de }
.folder { fill: #ffffff; stroke: #8c959f }
.file { fill: none; stroke: #8c959f; stroke-dasharray: 4 3 }
.title { font-size: 13px; font-weight: 600; fill: #1f2328 }
.name { font-size: 17px; font-weight: 600; fill: #0969da }
.arrow { fill: none; stroke: #818b98; stroke-width: 1.2 }
.head { fill: #818b98 }
.between { fill: none; stroke: #0969da; stroke-width: 2 }
.between-head { fill: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 }
  .sheet { fill: #0d1117 }
  .floor { fill: #151b23; stroke: #3d444d }
  .folder { fill: #0d1117; stroke: #656c76 }
  .file { stroke: #656c76 }
  .title { fill: #f0f6fc }
  .name { fill: #4493f8 }
  .between { stroke: #4493f8 }
  .between-head { fill: #4493f8 }
}
"""
# From the point of an arrow's head to its other corners.
HEADS: Final = {"down": "l-4 -7h8z", "left": "l8 -5v10z", "right": "l-8 -5v10z"}


def document(width: float, height: float, title: str, elements: list[str]) -> str:
    """Return a whole picture."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<style>{STYLE}</style>",
        rectangle("sheet", 0, 0, width, height),
    ]
    return "\n".join([*head, *elements, "</svg>", ""])


def rectangle(kind: str, x: float, y: float, width: float, height: float, radius: int = 0) -> str:
    """Return a rectangle from its left upper corner."""
    corner = f' rx="{radius}"' if radius else ""
    return (
        f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}"{corner}/>'
    )


def text(kind: str, x: float, y: float, words: str) -> str:
    """Return a line of text; `kind` may be empty."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:.0f}" y="{y:.0f}">{escape(words, quote=False)}</text>'


def path(kind: str, way: str) -> str:
    """Return a line along an SVG path."""
    return f'<path class="{kind}" d="{way}"/>'


def head(kind: str, x: float, y: float, direction: str = "down") -> str:
    """Return the head of an arrow whose point is at x, y."""
    return path(kind, f"M{x:.0f} {y:.0f}{HEADS[direction]}")

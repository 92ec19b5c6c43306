"""Synthetic pictures, and what can be asked about each: colours of shapes, a digit, a number of dots."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from PIL import Image, ImageDraw

from tests.support.images import encoded

COLOURS: Final = {
    "red": (215, 25, 30),
    "green": (25, 150, 40),
    "blue": (30, 50, 215),
    "yellow": (245, 225, 35),
    "purple": (140, 30, 160),
    "cyan": (40, 215, 225),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
}
SHAPES: Final = ("square", "circle", "triangle")
DIGITS: Final = tuple("0123456789")
NUMBERS: Final = ("one", "two", "three", "four", "five")
# What the processor makes of a picture is a multiple of this on both sides.
FACTOR: Final = 16
SIZES: Final = ((64, 64), (64, 80), (80, 64))
# Rows of three cells, from the top, and the size of a cell.
_FONT: Final = (
    (7, 5, 5, 5, 7),
    (2, 6, 2, 2, 7),
    (7, 1, 7, 4, 7),
    (7, 1, 7, 1, 7),
    (5, 5, 7, 1, 1),
    (7, 4, 7, 1, 7),
    (7, 4, 7, 5, 7),
    (7, 1, 1, 1, 1),
    (7, 5, 7, 5, 7),
    (7, 5, 7, 1, 7),
)
_CELL: Final = FACTOR // 2
_GAP: Final = 3
KINDS: Final = ("colour", "digit", "count")
# Dots are learned fast.
_OFTEN: Final = ("colour", "colour", "digit", "digit", "count")

T = TypeVar("T")
Random = np.random.Generator
Place = tuple[int, int]


@dataclass(frozen=True)
class Thing:
    """What is where in a picture: its middle, and how far it extends from there."""

    name: str
    colour: str
    place: Place
    reach: Place = (0, 0)


@dataclass(frozen=True)
class Scene:
    """A picture, and what is on it."""

    image: Image.Image
    kind: str
    things: Sequence[Thing]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What can be asked, if the question names something, and the answers."""
        match self.kind:
            case "colour":
                return [(thing.name, thing.colour) for thing in self.things]
            case "digit":
                return [("", self.things[0].name)]
            case _:
                return [("", NUMBERS[len(self.things) - 1])]

    def png(self) -> bytes:
        return encoded(self.image, "PNG")


def scene(random: Random, kind: str = "", size: Place | None = None) -> Scene:
    """Draw a picture of about this size of which questions of this kind can be asked; both random if not given."""
    kind = kind or pick(random, _OFTEN)
    width, height = (n + int(random.integers(-3, 4)) for n in size or pick(random, SIZES))
    image = Image.new("RGB", (width, height), (int(random.integers(105, 150)),) * 3)
    things = _THINGS[kind](random, image)
    return Scene(_noisy(random, image), kind, things)


def pick(random: Random, among: Sequence[T]) -> T:
    return among[int(random.integers(len(among)))]


def _noisy(random: Random, image: Image.Image) -> Image.Image:
    """Every other picture has noise, up to a tenth of the range."""
    strength = int(random.integers(-24, 25))
    if strength <= 0:
        return image
    pixels = np.array(image, np.int64)
    noise = random.integers(-strength, strength + 1, pixels.shape)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def _shapes(random: Random, image: Image.Image) -> list[Thing]:
    """One shape, or two that do not touch."""
    number = int(random.integers(1, 3))
    shapes, colours = (random.permutation(names)[:number] for names in (SHAPES, list(COLOURS)))
    radii = [int(radius) for radius in random.integers(12, 17, number)]
    places = _places(random, image.size, radii)
    while number == 2 and math.dist(*places) < sum(radii) + _GAP:
        places = _places(random, image.size, radii)
    draw = ImageDraw.Draw(image)
    things = []
    for shape, colour, radius, place in zip(shapes, colours, radii, places, strict=True):
        _draw_shape(draw, shape, colour, radius, place)
        things.append(Thing(str(shape), str(colour), place, (radius, radius)))
    return things


def _places(random: Random, size: Place, radii: Sequence[int]) -> list[Place]:
    width, height = size
    return [
        (int(random.integers(r, width - r)), int(random.integers(r, height - r))) for r in radii
    ]


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, colour: str, radius: int, place: Place
) -> None:
    x, y = place
    side = radius * 3 // 4
    match shape:
        case "square":
            draw.rectangle((x - side, y - side, x + side, y + side), COLOURS[colour])
        case "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), COLOURS[colour])
        case _:
            corners = [(x, y - radius), (x - radius, y + side), (x + radius, y + side)]
            draw.polygon(corners, COLOURS[colour])


def _digit(random: Random, image: Image.Image) -> list[Thing]:
    """Its cells are about where the model's patches are: others take much longer to learn."""
    digit = int(random.integers(10))
    colour = "white"
    left, top = (
        min(
            _CELL * int(random.integers(n // _CELL - m + 1)) + int(random.integers(2)),
            n - m * _CELL,
        )
        for n, m in zip(image.size, (3, 5), strict=True)
    )
    draw = ImageDraw.Draw(image)
    for row, bits in enumerate(_FONT[digit]):
        for column in range(3):
            if bits & 4 >> column:
                x, y = left + column * _CELL, top + row * _CELL
                draw.rectangle((x, y, x + _CELL - 1, y + _CELL - 1), COLOURS[colour])
    reach = (_CELL * 3 // 2, _CELL * 5 // 2)
    thing = Thing(str(digit), colour, (left + reach[0], top + reach[1]), reach)
    return [thing]


def _dots(random: Random, image: Image.Image) -> list[Thing]:
    """No two of them are at one of the model's tokens, or touch."""
    number = int(random.integers(1, 6))
    colour = pick(random, list(COLOURS))
    columns, rows = (n // FACTOR for n in image.size)
    radius = int(random.integers(4, 6))
    draw = ImageDraw.Draw(image)
    things = []
    for cell in random.permutation(columns * rows)[:number]:
        corner = (int(cell) % columns * FACTOR, int(cell) // columns * FACTOR)
        x, y = (n + FACTOR // 2 + int(random.integers(-2, 3)) for n in corner)
        _draw_shape(draw, "circle", colour, radius, (x, y))
        things.append(Thing("dot", colour, (x, y)))
    return things


_THINGS: Final[dict[str, Callable[[Random, Image.Image], list[Thing]]]] = {
    "colour": _shapes,
    "digit": _digit,
    "count": _dots,
}

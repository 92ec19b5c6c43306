"""Batches of conversations: tokens as a server makes them, and the pictures' patches by their grids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx
import numpy as np

from tests.support.seeing.folder import END, IMAGE, MERGE, START
from tests.support.seeing.pictures import COLOURS, DIGITS, SHAPES, Scene, Thing
from tests.support.seeing.talks import Talk

# What is learned of a token of a picture first: what it shows, and in which colour.
NAMES: Final = ("", *SHAPES, *DIGITS, "dot")
SHADES: Final = ("", *COLOURS)

Grid = tuple[int, int]


@dataclass(frozen=True)
class Pictures:
    """Patches of equally large pictures together.

    The pictures' tokens are counted from 1 through all grids; first_rows and sizes, in tokens, are in the
    order in which the pictures were given; labels has a row for each token.
    """

    by_grid: Sequence[tuple[Grid, mx.array]]
    first_rows: Sequence[int]
    sizes: Sequence[Grid]
    labels: mx.array


@dataclass(frozen=True)
class Batch:
    """Conversations: `targets` follow the tokens at `places`, which count through all conversations.

    rows: the row of the pictures' embeddings that stands in a token's place; 0 for text.
    """

    ids: mx.array
    positions: mx.array
    rows: mx.array
    places: mx.array
    targets: mx.array
    pictures: Pictures


def look(scenes: Sequence[Scene], processor: Any) -> Pictures:
    made = [processor(images=[scene.image]) for scene in scenes]
    grids = [(int(m["image_grid_thw"][0][1]), int(m["image_grid_thw"][0][2])) for m in made]
    sizes = [(height // MERGE, width // MERGE) for height, width in grids]
    order = sorted(range(len(scenes)), key=lambda i: grids[i])
    ends = np.cumsum([1, *(sizes[i][0] * sizes[i][1] for i in order)])
    first_rows = dict(zip(order, map(int, ends[:-1]), strict=True))
    by_grid = [
        (grid, mx.array(np.stack([made[i]["pixel_values"] for i in order if grids[i] == grid])))
        for grid in sorted(set(grids))
    ]
    labels = [_labels(scenes[i], sizes[i]) for i in order]
    rows = mx.array(np.concatenate([np.zeros((0, 2), np.int32), *labels]))
    return Pictures(by_grid, [first_rows[i] for i in range(len(scenes))], sizes, rows)


def _labels(scene: Scene, size: Grid) -> Any:
    """Return for each token of a picture what is there, and of which colour, as indices."""
    made = np.zeros((*size, 2), np.int32)
    for thing in scene.things:
        label = (NAMES.index(thing.name), SHADES.index(thing.colour))
        made[_tokens_of(thing, scene.image.size, size)] = label
    return made.reshape(-1, 2)


def _tokens_of(thing: Thing, pixels: tuple[int, int], size: Grid) -> Any:
    """Return where the tokens are whose middles the thing reaches, and that of its own middle."""
    (x, y), (wide, high) = thing.place, thing.reach
    down, across = pixels[1] / size[0], pixels[0] / size[1]
    rows, columns = (
        (np.arange(n) + 0.5) * step for n, step in zip(size, (down, across), strict=True)
    )
    near = (abs(rows - y) <= high)[:, None] & (abs(columns - x) <= wide)
    near[int(y / down), int(x / across)] = True
    return near


class Encoder:
    """Makes batches with a tokenizer, its chat template and an image processor."""

    def __init__(self, tokenizer: Any, processor: Any) -> None:
        self.processor = processor
        self._tokenizer = tokenizer
        self._image, self._end, start = tokenizer.convert_tokens_to_ids([IMAGE, END, START])
        self._before = [start, *tokenizer.encode("assistant\n", add_special_tokens=False)]

    def encode(self, talk: Talk, sizes: Sequence[Grid], *, is_prompt: bool = False) -> list[int]:
        """Return the tokens, with a placeholder for each token of an image."""
        tokens = self._tokenizer.apply_chat_template(
            talk.messages, add_generation_prompt=is_prompt, return_dict=False
        )
        images = iter(sizes)
        ids: list[int] = []
        for token in tokens:
            ids += [token] * (int(np.prod(next(images))) if token == self._image else 1)
        return ids

    def batch(self, talks: Sequence[Talk]) -> Batch:
        pictures = look([scene for talk in talks for scene in talk.scenes], self.processor)
        bounds = list(pairwise(np.cumsum([0, *(len(talk.scenes) for talk in talks)])))
        encoded = [
            self.encode(talk, pictures.sizes[slice(*bound)])
            for talk, bound in zip(talks, bounds, strict=True)
        ]
        length = max(map(len, encoded))
        ids = np.array([[*e, *[self._end] * (length - len(e))] for e in encoded], np.int32)
        rows = np.zeros(ids.shape, np.int32)
        axes = np.zeros((3, *ids.shape), np.int32)
        for i, bound in enumerate(bounds):
            images = slice(*bound)
            axes[:, i] = positions(ids[i] == self._image, pictures.sizes[images])
            rows[i, ids[i] == self._image] = [
                first + token
                for first, size in zip(
                    pictures.first_rows[images], pictures.sizes[images], strict=True
                )
                for token in range(size[0] * size[1])
            ]
        said = [i * length + at for i, e in enumerate(encoded) for at in self._said(e)]
        places = np.array(said, np.int32)
        targets = ids.reshape(-1)[places]
        return Batch(
            ids=mx.array(ids),
            positions=mx.array(axes),
            rows=mx.array(rows),
            places=mx.array(places - 1),
            targets=mx.array(targets),
            pictures=pictures,
        )

    def _said(self, ids: Sequence[int]) -> list[int]:
        """Return where the tokens are that the model says, ends among them."""
        before, said = len(self._before), []
        is_said = False
        for at, token in enumerate(ids):
            is_said = is_said or ids[max(0, at - before) : at] == self._before
            if is_said:
                said.append(at)
                is_said = token != self._end
        return said


def positions(is_image: Any, sizes: Sequence[Grid]) -> Any:
    """Return the three axes' positions: an image's rows and columns count from where the text stood."""
    axes = np.zeros((3, len(is_image)), np.int32)
    at = after = 0
    for height, width in sizes:
        first = at + int(np.argmax(is_image[at:]))
        axes[:, at:first] = after + np.arange(first - at)
        after += first - at
        at = first + height * width
        axes[:, first:at] = after
        axes[1, first:at] += np.repeat(np.arange(height), width)
        axes[2, first:at] += np.tile(np.arange(width), height)
        after += max(height, width)
    axes[:, at:] = after + np.arange(len(is_image) - at)
    return axes

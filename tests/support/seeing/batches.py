"""Batches of conversations: tokens as a server makes them, and the pictures' patches by their grids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx
import numpy as np

from tests.support.seeing.folder import END, IMAGE, MERGE, START
from tests.support.seeing.pictures import COLOURS, DIGITS, SHAPES, Scene, Thing
from tests.support.seeing.talks import PLACES, Talk

# What is learned of a token of a picture first: what it shows, and in which colour.
NAMES: Final = ("", *SHAPES, *DIGITS, "dot")
SHADES: Final = ("", *COLOURS)

Grid = tuple[int, int]


@dataclass(frozen=True)
class Pictures:
    """Patches of equally large pictures together, or what a tower has made of them.

    The pictures' tokens are counted from 1 through all of them.

    where: the first token of each scene, by its `id`, and how many rows and columns of tokens it has.
    labels: what each token shows.
    levels: embeddings of the tokens behind a row of zeros, and what is added behind the first layers.
    """

    by_grid: Sequence[tuple[Grid, mx.array]]
    where: Mapping[int, tuple[int, Grid]]
    labels: mx.array
    levels: Sequence[mx.array] = ()


@dataclass(frozen=True)
class Batch:
    """Conversations: `targets` follow the tokens at `places`, which count through all conversations.

    rows: the row of the pictures' embeddings that stands in a token's place; 0 for text.
    marks: places of all tokens of pictures, and ordinals, words for which of its conversation's pictures each is of.
    """

    ids: mx.array
    positions: mx.array
    rows: mx.array
    places: mx.array
    targets: mx.array
    marks: mx.array
    ordinals: mx.array
    pictures: Pictures


def look(scenes: Sequence[Scene], processor: Any) -> Pictures:
    made = [processor(images=[scene.image]) for scene in scenes]
    grids = [(int(m["image_grid_thw"][0][1]), int(m["image_grid_thw"][0][2])) for m in made]
    sizes = [(height // MERGE, width // MERGE) for height, width in grids]
    order = sorted(range(len(scenes)), key=lambda i: grids[i])
    firsts = np.cumsum([1, *(sizes[i][0] * sizes[i][1] for i in order)])
    by_grid = [
        (grid, mx.array(np.stack([made[i]["pixel_values"] for i in order if grids[i] == grid])))
        for grid in sorted(set(grids))
    ]
    labels = [_labels(scenes[i], sizes[i]) for i in order]
    return Pictures(
        by_grid,
        {id(scenes[i]): (int(firsts[at]), sizes[i]) for at, i in enumerate(order)},
        mx.array(np.concatenate([np.zeros((0, 2), np.int32), *labels])),
    )


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
        self._ordinals = [tokenizer.encode(f" {place}")[0] for place in PLACES]
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

    def batch(self, talks: Sequence[Talk], pictures: Pictures | None = None) -> Batch:
        """pictures: what holds those of the conversations, and more; made of them if None."""
        if pictures is None:
            pictures = look([scene for talk in talks for scene in talk.scenes], self.processor)
        where = [[pictures.where[id(scene)] for scene in talk.scenes] for talk in talks]
        sizes = [[size for _, size in images] for images in where]
        encoded = [self.encode(*of) for of in zip(talks, sizes, strict=True)]
        length = max(map(len, encoded))
        ids = np.array([[*e, *[self._end] * (length - len(e))] for e in encoded], np.int32)
        rows = np.zeros(ids.shape, np.int32)
        axes = np.zeros((3, *ids.shape), np.int32)
        ordinals: list[int] = []
        for i, images in enumerate(where):
            is_image = ids[i] == self._image
            axes[:, i] = positions(is_image, sizes[i])
            rows[i, is_image] = [
                first + token for first, (high, wide) in images for token in range(high * wide)
            ]
            for word, (high, wide) in zip(self._ordinals, sizes[i], strict=False):
                ordinals += [word] * (high * wide)
        said = [i * length + at for i, e in enumerate(encoded) for at in self._said(e)]
        places = np.array(said, np.int32)
        targets = ids.reshape(-1)[places]
        return Batch(
            ids=mx.array(ids),
            positions=mx.array(axes),
            rows=mx.array(rows),
            places=mx.array(places - 1),
            targets=mx.array(targets),
            marks=mx.array(np.flatnonzero(ids == self._image).astype(np.int32)),
            ordinals=mx.array(np.array(ordinals, np.int32)),
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

"""The images of an executor: what is encoded, and the rows and positions of images in its steps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from batching.backend.vision.axis_positions import Axes, AxisPositions
from batching.backend.vision.image_rows import ImageRows, PlacedRows
from batching.backend.vision.pieces import Pieces
from batching.backend.vision.tower import EncodedImage, Tower
from batching.inputs.images import PlacedImage
from batching.inputs.sequence_spec import SequenceSpec
from batching.steps.model_runner import SlicesFailed
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import EncodeOrder, Slice, StepPlan


class _PromptAxes(NamedTuple):
    """The positions of a prompt's tokens in several axes, `[3, P]`, and what is added behind it."""

    axes: Axes
    delta: int

    def between(self, start: int, stop: int) -> Axes:
        """Return those of tokens `[start, stop)`, of the prompt and behind it."""
        num_prompt = self.axes.shape[1]
        behind = np.arange(max(start, num_prompt), stop, dtype=np.int32) + self.delta
        return np.concatenate([self.axes[:, start:stop], np.tile(behind, (3, 1))], axis=1)


class _Part(NamedTuple):
    """Rows `[first, last)` of an image, which are at these rows of the step."""

    image: EncodedImage
    first: int
    last: int
    rows: npt.NDArray[np.int64]


@contextmanager
def isolate_encoding(orders: Sequence[EncodeOrder], encoded: Sequence[mx.array]) -> Iterator[None]:
    """Turn an error inside into SlicesFailed, if what is evaluated of images raises it alone as well."""
    try:
        yield
    except SlicesFailed:
        raise
    except Exception as error:
        try:
            mx.eval(encoded)
        except Exception:
            raise SlicesFailed(order.sequence_id for order in orders) from error
        raise


class Images:
    """Encodes what plans order, and places the rows of images in the steps that need them.

    Where the model has one position for a row, that of an image is like any other.
    """

    def __init__(self, tower: Tower, image_rows: ImageRows) -> None:
        self._tower = tower
        self._image_rows = image_rows
        self._encoded: dict[bytes, EncodedImage] = {}
        # Those of which some pieces are left to evaluate.
        self._begun: dict[bytes, tuple[EncodedImage, Pieces]] = {}
        self._axes: dict[int, _PromptAxes] = {}

    def begin(self, plan: StepPlan) -> list[mx.array]:
        """Follow a plan as far as it is about images; return the arrays to evaluate with its step.

        Raises:
            SlicesFailed: the tower does not take an image.
        """
        for sequence_id in plan.gone:
            self._axes.pop(sequence_id, None)
        for digest in plan.dropped_images:
            self._encoded.pop(digest, None)
            self._begun.pop(digest, None)
        encoded = [array for order in plan.encodes for array in self._encode(order)]
        if self._tower.pair_axes is not None:
            for started in plan.started:
                if started.spec.images:
                    self._axes[started.sequence_id] = self._prompt_axes(started.spec)
        return encoded

    def positions(self, slices: Sequence[Slice]) -> mx.array | None:
        """Return the positions of a step's rows for rotations; None if they are those in the sequences."""
        if not any(s.sequence_id in self._axes for s in slices):
            return None
        axes = np.concatenate([self._of_slice(s) for s in slices], axis=1)
        assert self._tower.pair_axes is not None
        return AxisPositions.of(axes, self._tower.pair_axes)

    def place(
        self, slices: Sequence[Slice], sequences: Mapping[int, SequenceState], tokens: mx.array
    ) -> None:
        """Put the rows of images into the step that runs next.

        tokens: int32 `[T, 1]`; those of rows of images become 0, which inputs by layer are made from.
        """
        parts: list[_Part] = []
        row = 0
        for s in slices:
            for placed in sequences[s.sequence_id].spec.images:
                parts += self._part(placed, s, row)
            row += len(s)
        if not parts:
            self._image_rows.placed = None
            return
        rows = mx.array(np.concatenate([part.rows for part in parts]).astype(np.int32))
        tokens[rows] = 0
        by_array = [
            mx.concatenate([part.image.arrays[i][part.first : part.last] for part in parts])
            for i in range(len(parts[0].image.arrays))
        ]
        self._image_rows.placed = PlacedRows(rows, by_array[0], by_array[1:])

    @property
    def are_placed(self) -> bool:
        """True if the step that runs next has rows of images."""
        return self._image_rows.placed is not None

    def leave(self) -> None:
        """Record that the step has run."""
        self._image_rows.placed = None

    def reset(self) -> None:
        """Forget all images and sequences."""
        self._encoded.clear()
        self._begun.clear()
        self._axes.clear()
        self.leave()

    def _encode(self, order: EncodeOrder) -> list[mx.array]:
        """Return what a step evaluates of an image."""
        digest = order.image.digest
        if order.first == 0:
            self._begun[digest] = self._begin(order)
        encoded, pieces = self._begun[digest]
        if order.is_last:
            del self._begun[digest]
            self._encoded[digest] = encoded
        return pieces.take(order.stop, order.num_pieces)

    def _begin(self, order: EncodeOrder) -> tuple[EncodedImage, Pieces]:
        try:
            return self._tower.encode(order.image)
        except Exception as error:
            # The code of a tower can raise anything.
            raise SlicesFailed([order.sequence_id]) from error

    def _part(self, placed: PlacedImage, s: Slice, row: int) -> list[_Part]:
        rows = placed.start + np.array(placed.image.rows)
        first, last = np.searchsorted(rows, (s.start, s.stop)).tolist()
        if first == last:
            return []
        encoded = self._encoded[placed.image.digest]
        return [_Part(encoded, first, last, rows[first:last] - s.start + row)]

    def _of_slice(self, s: Slice) -> Axes:
        if (of_prompt := self._axes.get(s.sequence_id)) is not None:
            return of_prompt.between(s.start, s.stop)
        return np.tile(np.arange(s.start, s.stop, dtype=np.int32), (3, 1))

    def _prompt_axes(self, spec: SequenceSpec) -> _PromptAxes:
        """Text counts on; an image has positions of its own, and what follows is behind the largest of them."""
        parts: list[Axes] = []
        done = at = 0
        for placed in spec.images:
            parts.append(np.tile(np.arange(placed.start - done, dtype=np.int32) + at, (3, 1)))
            own = self._tower.positions(placed.image)
            parts.append(own + (at := at + placed.start - done))
            at += int(own.max()) + 1
            done = placed.stop
        num_left = len(spec.prompt) - done
        parts.append(np.tile(np.arange(num_left, dtype=np.int32) + at, (3, 1)))
        return _PromptAxes(np.concatenate(parts, axis=1), at - done)

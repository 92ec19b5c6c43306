"""The towers of all families in pieces: what they leave to a later step, and that it is the same in the end."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.hooks.changes import Changes
from batching.backend.vision.image_rows import ImageRows
from batching.backend.vision.images import Images, isolate_encoding
from batching.backend.vision.tower import Tower, load_tower
from batching.steps.model_runner import SlicesFailed
from batching.steps.step_plan import EncodeOrder, StepPlan
from tests.support.requests import image_of
from tests.support.vision_models import FAMILIES, make_vision_model, write_vision_model

DEPTH: Final = 8
# At least, of what a layer returns for a tiny image.
LAYER_BYTES: Final = 64 * 32 * 4


@contextmanager
def tower_of(folder: Path) -> Iterator[Tower]:
    config = json.loads((folder / "config.json").read_text())
    changes = Changes()
    with mx.stream(mx.cpu):
        tower = load_tower(folder, config, None, changes)
        mx.eval(tower.weights)
        yield tower
    changes.undo()


def num_left(arrays: Sequence[mx.array], folder: Path) -> int:
    """Return how many operations have to be evaluated for these arrays."""
    graph = folder / "graph.dot"
    mx.export_to_dot(str(graph), *arrays)
    return graph.read_text().count("rectangle")


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_leave_the_rest_and_make_the_rows_of_the_whole(family: str, tmp_path: Path) -> None:
    make_vision_model(family, tmp_path)
    image = FAMILIES[family].image(0)
    with tower_of(tmp_path) as tower:
        num = tower.num_pieces
        assert num == len(tower._layers) > 1
        whole, pieces = tower.encode(image)
        mx.eval(pieces.take(num, num))
        assert not pieces.take(num, num)
        encoded, pieces = tower.encode(image)
        left = [num_left(encoded.arrays, tmp_path)]
        for stop in range(1, num + 1):
            mx.eval(pieces.take(stop, num))
            left.append(num_left(encoded.arrays, tmp_path))
    # No layer is evaluated before its piece, and each with it.
    assert max(np.diff(left)) < 0 == left[-1]
    pairs = zip(encoded.arrays, whole.arrays, strict=True)
    assert all(mx.array_equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_a_piece_frees_what_it_has_read(family: str, tmp_path: Path) -> None:
    write_vision_model(FAMILIES[family].deep(DEPTH), tmp_path)
    used: list[int] = []
    with tower_of(tmp_path) as tower:
        assert tower.num_pieces == DEPTH
        encoded, pieces = tower.encode(FAMILIES[family].image(0))
        for stop in range(1, DEPTH + 1):
            mx.eval(pieces.take(stop, DEPTH))
            used.append(mx.get_active_memory())
    # The mergers of deepstack, behind the first two layers, have rows that stay.
    assert max(used[2:]) - used[2] < 2 * LAYER_BYTES
    assert encoded.arrays


def test_what_is_made_of_a_layer_for_the_end_is_evaluated_with_it(tmp_path: Path) -> None:
    """Else that layer's output would stay, too."""
    make_vision_model("qwen3_vl", tmp_path)
    with tower_of(tmp_path) as tower:
        encoded, pieces = tower.encode(FAMILIES["qwen3_vl"].image(0))
        mx.eval(pieces.take(1, 3))
        left = [num_left([array], tmp_path) for array in encoded.added]
    assert left[0] == 0 < left[1]


def test_nothing_stays_of_an_image_that_is_dropped_half_done(tmp_path: Path) -> None:
    make_vision_model("idefics3", tmp_path)
    image = FAMILIES["idefics3"].image(0)
    with tower_of(tmp_path) as tower:
        images = Images(tower, ImageRows())
        first = StepPlan((), encodes=(EncodeOrder(0, image, 0, 1, 2),))
        mx.eval(images.begin(first))
        used = mx.get_active_memory()
        images.begin(StepPlan((), dropped_images=(image.digest,)))
        freed = used - mx.get_active_memory()
    assert freed > LAYER_BYTES


def test_other_numbers_of_pieces_are_parts_of_about_the_same_size(tmp_path: Path) -> None:
    write_vision_model(FAMILIES["llava"].deep(DEPTH), tmp_path)
    with tower_of(tmp_path) as tower:
        for num_pieces, expected in ((3, [2, 3, 3]), (1, [DEPTH]), (16, [0, 1] * DEPTH)):
            _, pieces = tower.encode(FAMILIES["llava"].image(0))
            before = len(pieces._left)
            found: list[int] = []
            for stop in range(1, num_pieces + 1):
                pieces.take(stop, num_pieces)
                found.append(before - len(pieces._left))
                before = len(pieces._left)
            assert found == expected


def test_what_is_evaluated_of_an_image_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders = [EncodeOrder(7, image_of(b"a", 1), 1, 2, 3)]
    good, bad = mx.zeros(1), mx.ones(1)

    def evaluate(arrays: Any) -> None:
        if bad in arrays:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(mx, "eval", evaluate)
    with pytest.raises(KeyError), isolate_encoding(orders, [good]):
        raise KeyError
    with pytest.raises(SlicesFailed, match="3"), isolate_encoding(orders, [bad]):
        raise SlicesFailed([3])
    with pytest.raises(SlicesFailed, match="7"), isolate_encoding(orders, [bad]):
        raise RuntimeError

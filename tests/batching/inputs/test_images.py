"""Images as values: what tells one from another, and what stands for them in the prefix cache."""

from dataclasses import replace

from batching.inputs.images import ImageInput, PlacedImage, TowerArray, cache_ids

PIXELS = TowerArray("pixel_values", "<f4", (1, 2), b"01234567")
GRID = TowerArray("grid", "<i8", (1,), b"01234567")
IMAGE = ImageInput((7, 5, 5, 8), (1, 2), (PIXELS, GRID))


def test_an_image_is_known_by_all_that_its_tower_reads() -> None:
    others = [
        replace(IMAGE, token_ids=(7, 5, 5, 9)),
        replace(IMAGE, rows=(1, 3)),
        replace(IMAGE, arrays=(PIXELS,)),
        replace(IMAGE, arrays=(PIXELS._replace(name="pixels"), GRID)),
        replace(IMAGE, arrays=(PIXELS._replace(dtype="<i4"), GRID)),
        replace(IMAGE, arrays=(PIXELS._replace(shape=(2, 1)), GRID)),
        replace(IMAGE, arrays=(PIXELS._replace(data=b"01234568"), GRID)),
    ]
    assert len({each.digest for each in (IMAGE, *others)}) == 1 + len(others)
    assert replace(IMAGE, arrays=(GRID, PIXELS)).digest == IMAGE.digest
    assert IMAGE.num_bytes == 16
    assert IMAGE.num_rows == 2


def test_rows_are_named_by_their_image_and_their_place_and_other_tokens_stay() -> None:
    ids = cache_ids((1, *IMAGE.token_ids, 2), (PlacedImage(1, IMAGE),))
    assert (ids[:2], ids[4:]) == ([1, 7], [8, 2])
    assert ids[2] != ids[3]
    assert all(-(1 << 63) <= each < 0 for each in ids[2:4])
    other = replace(IMAGE, arrays=(PIXELS._replace(data=b"01234568"), GRID))
    assert not {*other.cache_ids} & {*ids[2:4]}


def test_the_names_of_rows_outlive_the_process() -> None:
    """With other ones nothing would be found of what is on disk."""
    assert list(IMAGE.cache_ids[1:3]) == [-8594390757786260802, -6914908366005217072]

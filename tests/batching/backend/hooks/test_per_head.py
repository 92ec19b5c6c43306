"""All rows of a step are one product with a head's matrix, and rows are what they were."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.mla import MultiLinear

from batching.backend.hooks.changes import Changes
from batching.backend.hooks.per_head import join_rows

NUM_HEADS: Final = 3
INPUT_DIMS: Final = 64
OUTPUT_DIMS: Final = 32
NUM_ROWS: Final = 5


class Model(nn.Module):
    """Has a matrix for each head, quantized or not."""

    def __init__(self, *, is_quantized: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        made = MultiLinear(INPUT_DIMS, OUTPUT_DIMS, NUM_HEADS)
        self.embed_q = made.to_quantized(group_size=32, bits=8) if is_quantized else made


def rows(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(7))


STEP: Final = rows(NUM_ROWS, NUM_HEADS, 1, INPUT_DIMS)
CHUNK: Final = rows(1, NUM_HEADS, NUM_ROWS, INPUT_DIMS)
SHARED: Final = rows(NUM_ROWS, 1, 1, OUTPUT_DIMS)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(
    ("x", "transpose"),
    [(STEP, True), (CHUNK, True), (SHARED, False)],
    ids=["rows of a step", "a chunk", "rows that heads share"],
)
def test_the_products_are_those_of_the_model(
    x: mx.array, transpose: bool, is_quantized: bool
) -> None:
    model = Model(is_quantized=is_quantized)
    expected = model.embed_q(x, transpose=transpose)
    join_rows(model, Changes())
    joined = model.embed_q(x, transpose=transpose)
    assert joined.shape == expected.shape
    assert mx.allclose(joined, expected, atol=1e-5)


def test_a_step_is_one_product_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = Model(), list[tuple[int, ...]]()
    plain: Any = MultiLinear.__call__

    def watched(self: MultiLinear, x: mx.array, *args: Any) -> mx.array:
        shapes.append(x.shape)
        product: mx.array = plain(self, x, *args)
        return product

    monkeypatch.setattr(MultiLinear, "__call__", watched)
    join_rows(model, Changes())
    model.embed_q(STEP)
    model.embed_q(CHUNK)
    assert shapes == 2 * [(1, NUM_HEADS, NUM_ROWS, INPUT_DIMS)]


def test_joining_twice_changes_nothing() -> None:
    model = Model()
    join_rows(model, Changes())
    joined = type(model.embed_q)
    join_rows(model, Changes())
    assert type(model.embed_q) is joined

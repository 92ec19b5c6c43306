"""What linear layers add to their rows: to each by its adapter, to others nothing, not even rounding."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from batching.adapters.adapter import AdaptableLayers
from batching.adapters.low_rank import LowRank
from batching.backend.adapters.linears import AdaptedLinears, LinearModules
from batching.backend.adapters.model import ModelAdapters
from batching.backend.adapters.stacked import StackedLinearModules
from batching.backend.hooks.call_rows import CallRows
from batching.backend.hooks.changes import Changes
from batching.steps.step_plan import Slice

INPUTS: Final = 24
OUTPUTS: Final = 40
PATH: Final = "layers.0.proj"


def low_rank(rank: int, seed: int, dtype: str = "F32", scale: float = 1.0) -> LowRank:
    rng = np.random.default_rng(seed)
    shapes = (INPUTS, rank), (rank, OUTPUTS)
    halves = {"F16": mx.float16, "BF16": mx.bfloat16}.get(dtype, mx.float32)
    a, b = (
        np.array(mx.array(rng.normal(size=shape), mx.float32).astype(halves).astype(mx.float32))
        for shape in shapes
    )
    return LowRank(a, scale * b, dtype)


ADAPTERS: Final = (low_rank(4, 1), low_rank(1, 2), low_rank(7, 3, "F16"))


def slices(*slots: int, num_tokens: int = 1, is_prefill: bool = False) -> list[Slice]:
    return [
        Slice(i, 0, (0,) * num_tokens, adapter_slot=slot, is_prefill=is_prefill)
        for i, slot in enumerate(slots)
    ]


def rows_of(some: list[Slice]) -> CallRows:
    return CallRows(some, sum(map(len, some)))


def segmented(modules: dict[str, nn.Module]) -> AdaptedLinears:
    return LinearModules(modules, Changes())


def stacked(modules: dict[str, nn.Module]) -> AdaptedLinears:
    return StackedLinearModules(modules, 3, Changes())


KINDS: Final = pytest.mark.parametrize("kind", [segmented, stacked])
Kind = Callable[[dict[str, nn.Module]], AdaptedLinears]


class Layer:
    """A linear layer, and what it gives without and with adapters."""

    def __init__(self, kind: Kind, dtype: mx.Dtype = mx.float32) -> None:
        mx.random.seed(3)
        self.linear = nn.Linear(INPUTS, OUTPUTS)
        self.linear.set_dtype(dtype)
        self.plain = nn.Linear(INPUTS, OUTPUTS)
        self.plain.update(self.linear.parameters())
        self.linears = kind({PATH: self.linear})
        self.weights = dict(enumerate(ADAPTERS, 1))
        for slot, each in self.weights.items():
            self.linears.put(slot, {PATH: each})

    def expected(self, x: mx.array, slots: list[int]) -> mx.array:
        y = self.plain(x)
        added = []
        for row, slot in zip(x, slots, strict=True):
            a, b = (
                self.weights[slot][:2] if slot else (np.zeros((INPUTS, 1)), np.zeros((1, OUTPUTS)))
            )
            added.append(row.astype(mx.float32) @ mx.array((a @ b).astype(np.float32)))
        return y + mx.stack(added)

    def __call__(self, x: mx.array, rows: CallRows | None) -> mx.array:
        self.linears.use(rows)
        y = self.linear(x)
        self.linears.use(None)
        return y


@KINDS
@pytest.mark.parametrize("is_prefill", [False, True])
@pytest.mark.parametrize("shape", [(1,), (5, 1), ()])
def test_each_row_has_its_own(kind: Kind, is_prefill: bool, shape: tuple[int, ...]) -> None:
    layer = Layer(kind)
    slots = [0, 0, 1, 2, 2, 0, 3, 1]
    x = mx.random.normal((len(slots), *shape, INPUTS))
    y = layer(x, rows_of(slices(*slots, is_prefill=is_prefill)))
    assert mx.allclose(y, layer.expected(x, slots), atol=1e-4)
    for row, slot in enumerate(slots):
        if not slot:
            assert mx.array_equal(y[row], layer.plain(x)[row])
    assert mx.array_equal(layer(x, None), layer.plain(x))


@KINDS
def test_decodes_and_chunks_are_in_one_step(kind: Kind) -> None:
    layer = Layer(kind)
    some = [*slices(1, 3, 0), *slices(0, 2, num_tokens=3, is_prefill=True), *slices(2)]
    slots = [s.adapter_slot for s in some for _ in s.token_ids]
    x = mx.random.normal((len(slots), 1, INPUTS))
    assert mx.allclose(layer(x, rows_of(some)), layer.expected(x, slots), atol=1e-4)


@KINDS
def test_a_row_may_be_several(kind: Kind) -> None:
    layer = Layer(kind)
    x = mx.random.normal((6, INPUTS))
    y = layer(x, rows_of(slices(1, 0, 3)))
    assert mx.allclose(y, layer.expected(x, [1, 1, 0, 0, 3, 3]), atol=1e-4)
    with pytest.raises(ValueError, match=r"layers\.0\.proj is not called with the rows of a step"):
        layer(mx.zeros((1, 3, INPUTS)), rows_of(slices(1, 0, 3)))
    with pytest.raises(ValueError, match=r"but with \(24,\)"):
        layer(mx.zeros(INPUTS), rows_of(slices(1, 0, 3)))


@KINDS
@pytest.mark.parametrize("slot", [0, 2])
def test_a_chunk_has_one_adapter(kind: Kind, slot: int) -> None:
    layer = Layer(kind)
    x = mx.random.normal((1, 4, INPUTS))
    some = slices(slot, num_tokens=9, is_prefill=True)
    y = layer(x, CallRows(some, 4, is_chunk=True))
    assert mx.allclose(y, layer.expected(x, [slot]), atol=1e-4)


@KINDS
def test_an_adapter_leaves_layers_alone_that_it_has_not(kind: Kind) -> None:
    layer = Layer(kind)
    layer.linears.put(2, {})
    x = mx.random.normal((3, 1, INPUTS))
    y = layer(x, rows_of(slices(1, 2, 3)))
    assert mx.allclose(y[::2], layer.expected(x, [1, 0, 3])[::2], atol=1e-4)
    assert mx.array_equal(y[1], layer.plain(x)[1])


@KINDS
def test_what_is_built_keeps_what_was_in_a_slot(kind: Kind) -> None:
    layer = Layer(kind)
    x = mx.random.normal((2, 1, INPUTS))
    rows = rows_of(slices(1, 2))
    expected = layer.expected(x, [1, 2])
    y = layer(x, rows)
    layer.weights[1] = low_rank(9, 5)
    layer.linears.put(1, {PATH: layer.weights[1]})
    assert mx.allclose(y, expected, atol=1e-4)
    assert mx.allclose(layer(x, rows), layer.expected(x, [1, 2]), atol=1e-4)


@KINDS
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_outputs_have_the_type_of_the_layer(kind: Kind, dtype: mx.Dtype) -> None:
    layer = Layer(kind, dtype)
    x = mx.random.normal((3, 1, INPUTS)).astype(dtype)
    y = layer(x, rows_of(slices(1, 0, 3)))
    assert y.dtype == dtype
    assert mx.allclose(y, layer.expected(x, [1, 0, 3]), atol=0.3, rtol=0.02)


def test_stacks_hold_what_files_hold() -> None:
    """16 bits where that is exact: a scale of 20 may need more."""
    linears = StackedLinearModules({PATH: nn.Linear(INPUTS, OUTPUTS)}, 2, Changes())

    def dtypes() -> list[mx.Dtype]:
        return [array.dtype for array in linears._stacks[PATH]]

    linears.put(1, {PATH: low_rank(4, 1, "BF16", scale=2.0)})
    assert dtypes() == [mx.bfloat16, mx.bfloat16]
    linears.put(2, {PATH: low_rank(2, 1, "BF16", scale=20 / 3)})
    assert dtypes() == [mx.bfloat16, mx.float32]
    linears.put(2, {PATH: low_rank(2, 1, "F16")})
    assert dtypes() == [mx.float32, mx.float32]
    linears.clear()
    linears.put(2, {PATH: low_rank(2, 1, "F16")})
    assert dtypes() == [mx.float16, mx.float16]


def test_nothing_stays_of_an_adapter_that_was_put_by_half() -> None:
    linear, other = nn.Linear(INPUTS, OUTPUTS), nn.Linear(INPUTS, OUTPUTS)
    linears = StackedLinearModules({PATH: linear, "other": other}, 3, Changes())
    linears.put(1, {"other": ADAPTERS[0]})
    no_memory: Any = None
    with pytest.raises(TypeError):
        linears.put(2, {PATH: ADAPTERS[1], "other": no_memory})
    linears.put(2, {"other": ADAPTERS[2]})
    x = mx.random.normal((2, 1, INPUTS))
    plain = linear(x)
    linears.use(rows_of(slices(1, 2)))
    assert mx.array_equal(linear(x), plain)


def test_rows_without_adapters_run_the_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(segmented)
    adapters = ModelAdapters([layer.linears], AdaptableLayers({}, {}, 8))

    def use(rows: CallRows | None) -> None:
        raise AssertionError("there is nothing to add")

    monkeypatch.setattr(layer.linears, "use", use)
    with adapters.running(slices(0, 0)):
        layer.linear(mx.zeros((2, 1, INPUTS)))

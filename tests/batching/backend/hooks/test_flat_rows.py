"""Quantized products in two dimensions: other shapes, the same numbers."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import pytest

from batching.backend.devices import Gpu
from batching.backend.execution_mode import ExecutionMode
from batching.backend.hooks.changes import Changes
from batching.backend.hooks.flat_rows import flatten_rows
from tests.support.platforms import check_model
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

Shapes = list[tuple[int, ...]]

NUM_INPUTS: Final = 64


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """Return the shapes of what is multiplied with quantized weights."""
    seen: Shapes = []
    product = mx.quantized_matmul

    def watched(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        seen.append(x.shape)
        return product(x, *args, **kwargs)

    monkeypatch.setattr(mx, "quantized_matmul", watched)
    return seen


def linear(bias: bool) -> nn.QuantizedLinear:
    layer = nn.QuantizedLinear(NUM_INPUTS, 32, bias=bias, group_size=32, bits=4)
    if bias:
        layer.bias = mx.random.normal((32,))
    return layer


@pytest.mark.parametrize("bias", [False, True])
def test_the_rows_of_a_step_are_one_product(shapes: Shapes, bias: bool) -> None:
    plain, flat = linear(bias), linear(bias)
    flat.update(plain.parameters())
    flatten_rows(flat, Changes())
    for x in (mx.random.normal((5, 1, NUM_INPUTS)), mx.random.normal((1, 5, NUM_INPUTS))):
        expected, computed = plain(x), flat(x)
        assert computed.shape == expected.shape
        assert mx.allclose(computed, expected, atol=1e-5)
    assert shapes == [(5, 1, NUM_INPUTS), (5, NUM_INPUTS), (1, 5, NUM_INPUTS), (1, 5, NUM_INPUTS)]


@pytest.mark.parametrize("kind", [nn.QuantizedAllToShardedLinear, nn.QuantizedShardedToAllLinear])
def test_so_are_those_of_a_part_of_a_layer(shapes: Shapes, kind: Any) -> None:
    layer = kind.from_quantized_linear(linear(bias=True), group=mx.distributed.init())
    x = mx.random.normal((5, 1, NUM_INPUTS))
    expected = layer(x)
    flatten_rows(layer, Changes())
    assert mx.allclose(layer(x), expected, atol=1e-5)
    assert shapes == [(5, 1, NUM_INPUTS), (5, NUM_INPUTS)]


def test_so_are_logits_of_tied_embeddings(shapes: Shapes) -> None:
    embedding = nn.QuantizedEmbedding(40, NUM_INPUTS, group_size=32, bits=4)
    x = mx.random.normal((3, 1, NUM_INPUTS))
    tokens = mx.array([[3], [39]])
    expected, embedded = embedding.as_linear(x), embedding(tokens)
    flatten_rows(embedding, Changes())
    assert mx.allclose(embedding.as_linear(x), expected, atol=1e-5)
    assert mx.array_equal(embedding(tokens), embedded)
    assert shapes == [(3, 1, NUM_INPUTS), (3, NUM_INPUTS)]


def test_other_shapes_and_other_classes_stay_as_they_are(shapes: Shapes) -> None:
    class Own(nn.QuantizedLinear):
        pass

    own = Own(NUM_INPUTS, 32, bias=False, group_size=32, bits=4)
    plain = linear(bias=False)
    flatten_rows(nn.Sequential(own, plain), Changes())
    assert type(own) is Own
    for shape in ((4, NUM_INPUTS), (2, 3, NUM_INPUTS), (1, 1, NUM_INPUTS), (3, 2, 1, NUM_INPUTS)):
        assert plain(mx.zeros(shape)).shape == (*shape[:-1], 32)
        assert shapes.pop() == shape


@pytest.mark.parametrize(("gpu", "is_flat"), [(Gpu.CUDA, True), (Gpu.METAL, False), (None, False)])
def test_a_model_is_flattened_on_cuda_where_mlx_does_not_do_it(
    shapes: Shapes, gpu: Gpu | None, is_flat: bool, all_quantized: Callable[[nn.Module], None]
) -> None:
    model = tiny_model("llama")
    all_quantized(model)
    checked = check_model(model, VOCAB_SIZE, gpu=gpu)
    assert checked.mode is ExecutionMode.RAGGED
    assert any(len(shape) == 2 for shape in shapes) == is_flat
    assert any(len(shape) == 3 and shape[0] > 1 and shape[1] == 1 for shape in shapes) != is_flat


@pytest.fixture
def all_quantized() -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        def fits(_: str, module: nn.Module) -> bool:
            return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

        nn.quantize(model, group_size=32, bits=4, class_predicate=fits)

    return quantize

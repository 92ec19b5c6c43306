"""Experts on the native kernels compute what mlx-lm's do, each row by itself."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchLinear, SwitchMLP

from batching.backend.platforms.cpu.layers.experts import Experts
from batching.backend.platforms.cpu.layers.replace import min_input_bits
from batching.backend.platforms.cpu.native_loader import Native
from tests.support.platforms import replace_modules

NUM_EXPERTS: Final = 7
QUANTIZATIONS: Final = [
    None,
    {"group_size": 32, "bits": 4},
    {"group_size": 64, "bits": 8},
    {"group_size": 64, "bits": 3},
    {"group_size": 32, "bits": 5},
    {"group_size": 64, "bits": 6},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
]


def randomize_biases(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, SwitchLinear) and "bias" in module:
            module.bias = mx.random.normal(module.bias.shape)


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module, quantization: dict[str, Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.experts = experts
        randomize_biases(self)
        if quantization:
            nn.quantize(
                self, **quantization, class_predicate=lambda _, m: hasattr(m, "to_quantized")
            )

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        outputs: mx.array = self.experts(x, indices)
        return outputs


def routed(num_rows: int, size: int = 128) -> tuple[mx.array, mx.array]:
    return (
        mx.random.normal((1, num_rows, size)),
        mx.random.randint(0, NUM_EXPERTS, (1, num_rows, 3)),
    )


def assert_close(actual: mx.array, expected: mx.array, tolerance: float = 1e-6) -> None:
    largest = float(np.abs(np.array(expected)).max())
    np.testing.assert_allclose(np.array(actual), np.array(expected), 0, tolerance * largest)


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
@pytest.mark.parametrize("activation", [SwiGLU(), SwigluOAI()], ids=["swiglu", "clipped"])
def test_gated_experts(
    native: Native, activation: nn.Module, quantization: dict[str, Any] | None
) -> None:
    mx.random.seed(1)
    experts = SwitchGLU(128, 192, NUM_EXPERTS, activation=activation, bias=True)
    model = Mixture(experts, quantization)
    cases = [routed(num_rows) for num_rows in (1, 5, 40)]
    expected = [model(4 * x, indices) for x, indices in cases]
    mx.eval(expected)
    replaced = replace_modules(model, native)
    assert type(replaced.experts) is Experts
    for (x, indices), plain in zip(cases, expected, strict=True):
        together = replaced(4 * x, indices)
        assert_close(together, plain)
        alone = [replaced(4 * x[:, i], indices[:, i]) for i in range(x.shape[1])]
        assert mx.array_equal(mx.stack(alone, axis=1), together)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_experts_with_an_activation_of_their_own(native: Native, num_rows: int) -> None:
    """Where the kernels do not know the activation, they compute the products around it."""
    mx.random.seed(2)
    for experts in (
        SwitchGLU(128, 96, NUM_EXPERTS, activation=lambda x, gate: x * mx.tanh(gate), bias=True),
        SwitchMLP(128, 96, NUM_EXPERTS, bias=True),
    ):
        model = Mixture(experts)
        x, indices = routed(num_rows)
        expected = model(x, indices)
        mx.eval(expected)
        assert_close(replace_modules(model, native)(x, indices), expected)


def test_rows_that_go_to_an_expert_together(native: Native) -> None:
    """As models call it that sort rows themselves, or have several rows for an index."""
    mx.random.seed(3)
    model = nn.Module()
    model.product = SwitchLinear(64, 48, NUM_EXPERTS, bias=False)
    x = mx.random.normal((20, 2, 1, 64))
    experts = mx.array([[4, 2]])
    several = mx.random.normal((3, 5, 64))
    indices = mx.array([6, 0, 6])
    expected = model.product(x, experts), model.product(several, indices)
    mx.eval(expected)
    replaced = replace_modules(model, native)
    assert_close(replaced.product(x, experts), expected[0])
    assert_close(replaced.product(several, indices, sorted_indices=True), expected[1])


def test_gate_and_up_may_be_packed_unlike(native: Native) -> None:
    mx.random.seed(4)
    model = Mixture(SwitchGLU(128, 64, NUM_EXPERTS, bias=False))
    model.experts.gate_proj = model.experts.gate_proj.to_quantized(64, 4)
    model.experts.up_proj = model.experts.up_proj.to_quantized(32, 8)
    x, indices = routed(5)
    expected = model(x, indices)
    mx.eval(expected)
    assert_close(replace_modules(model, native)(x, indices), expected)


def test_the_roundest_inputs_may_be_those_of_experts(native: Native) -> None:
    model = Mixture(SwitchGLU(64, 64, 4, bias=False), {"group_size": 32, "bits": 4})
    rounded = replace_modules(model, native, input_bits=16)
    assert min_input_bits(rounded) == max(16, native.min_input_bits)


def test_experts_stay_as_small_as_they_are_stored(native: Native) -> None:
    quantization = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    model = Mixture(SwitchGLU(512, 512, 16, bias=False), quantization)
    before = native.module.weight_bytes()
    replaced = replace_modules(model, native)
    stored = 3 * 16 * 512 * 512 * (4 + 8 / 32) / 8
    assert native.module.weight_bytes() - before == stored
    del replaced


@pytest.mark.parametrize(
    ("x", "indices", "message"),
    [
        ((2, 64), (3,), "as many indices for each row"),
        ((2, 32), (2, 2), "as many inputs as weights"),
        ((0, 64), (0, 2), "as many indices for each row"),
    ],
)
def test_what_does_not_fit_is_refused(
    native: Native, x: tuple[int, ...], indices: tuple[int, ...], message: str
) -> None:
    layer = native.module.expert_layer(native.module.pack(mx.zeros((4, 32, 64))))
    with pytest.raises(ValueError, match=message):
        native.module.switch_linear(mx.zeros(x), mx.zeros(indices, mx.int32), layer)

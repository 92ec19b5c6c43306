"""Types of GGUF with integer scales: the kernels compute with the weights that the format defines."""

from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type

from batching.backend.gguf.file.quantizations import read_weight
from batching.backend.platforms.cpu.native_loader import Native
from batching.model_files.gguf_header import read_header
from tests.support.gguf_models import (
    Array,
    blocks,
    load_gguf,
    metadata_of,
    random_model,
    tensors_of,
)
from tests.support.gguf_writer import RawTensor, write_gguf
from tests.support.platforms import replace_modules

# Bits of a weight, with its part of scales and their factors.
BITS: Final = {
    "Q2_K": 5.25,
    "Q3_K": 4.625,
    "Q4_K": 4.625,
    "Q5_K": 8.625,
    "Q6_K": 8.625,
    "IQ1_S": 8.3125,
    "IQ1_M": 8.625,
    "IQ2_XXS": 8.3125,
    "IQ2_XS": 8.625,
    "IQ2_S": 8.625,
    "IQ3_XXS": 8.3125,
    "IQ3_S": 8.3125,
    "IQ4_XS": 8.3125,
}
SHAPE: Final = (96, 512)
# Of the largest output.
TOLERANCES: Final = {32: 1e-6, 16: 2e-4}
TOKENS: Final = mx.array([[1, 5, 9, 2]])


@pytest.fixture
def kernels(native: Native) -> Any:
    return native.module


def packed(
    kernels: Any, tmp_path: Path, name: str, input_bits: int = 32, seed: int = 3
) -> tuple[Any, Array]:
    raw, expected = blocks(Type[name], SHAPE, seed)
    header = read_header(write_gguf(tmp_path / f"{name}.gguf", {}, {"t.weight": raw}))
    weight = read_weight(header, "t.weight", None, has_kernels=True)
    assert weight.format is not None
    parts = (weight.parts[part] for part in ("weight", "scales", "biases"))
    return kernels.pack(*parts, weight.format.bits, input_bits), expected


def input_bits_of(kernels: Any) -> list[int]:
    return [bits for bits in TOLERANCES if bits >= kernels.min_input_bits()]


@pytest.mark.parametrize("name", BITS)
def test_the_weights_are_the_formats_to_the_bit(kernels: Any, tmp_path: Path, name: str) -> None:
    for input_bits in input_bits_of(kernels):
        weights, expected = packed(kernels, tmp_path, name, input_bits)
        assert weights.nbytes * 8 == BITS[name] * expected.size
        tokens = mx.arange(SHAPE[0])[:, None]
        np.testing.assert_array_equal(np.array(kernels.embed(tokens, weights))[:, 0], expected)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_products_are_those_of_the_formats_weights(
    kernels: Any, tmp_path: Path, name: str, rows: int
) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, SHAPE[1])).astype(np.float32)
    for input_bits in input_bits_of(kernels):
        weights, expected = packed(kernels, tmp_path, name, input_bits)
        (y,) = kernels.linear(mx.array(x), [weights], [None])
        product = x.astype(np.float64) @ expected.astype(np.float64).T
        most = TOLERANCES[input_bits] * np.abs(product).max()
        np.testing.assert_allclose(np.array(y), product, rtol=0, atol=most)
        for row in range(rows):
            (alone,) = kernels.linear(mx.array(x[row : row + 1]), [weights], [None])
            assert mx.array_equal(alone[0], y[row])


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_of_one_input_may_have_groups_of_16_and_of_32(
    kernels: Any, tmp_path: Path, rows: int
) -> None:
    """As q and k of Q4_K, and v of Q6_K."""
    x = mx.random.normal((rows, SHAPE[1]))
    for input_bits in input_bits_of(kernels):
        names = ("Q4_K", "Q6_K", "Q2_K")
        weights = [packed(kernels, tmp_path, name, input_bits)[0] for name in names]
        together = kernels.linear(x, weights, [None] * 3)
        alone = [kernels.linear(x, [matrix], [None])[0] for matrix in weights]
        assert all(mx.array_equal(y, z) for y, z in zip(together, alone, strict=True))


def test_a_scale_that_is_another_gives_other_weights(kernels: Any, tmp_path: Path) -> None:
    """The comparisons above would find a scale of the wrong group."""
    raw, expected = blocks(Type.Q6_K, SHAPE, 3)
    data = bytearray(raw.content)
    data[192], data[193] = 1, 2  # of the first two groups
    tensor = RawTensor(raw.kind, SHAPE, bytes(data))
    header = read_header(write_gguf(tmp_path / "m.gguf", {}, {"t.weight": tensor}))
    weight = read_weight(header, "t.weight", None, has_kernels=True)
    parts = (weight.parts[part] for part in ("weight", "scales", "biases"))
    (row,) = np.array(kernels.embed(mx.array([[0]]), kernels.pack(*parts, 8)))[:, 0]
    assert (row[:16] != expected[0, :16]).any()
    assert (row[16:32] != expected[0, 16:32]).any()
    np.testing.assert_array_equal(row[32:], expected[0, 32:])


def test_a_model_of_such_types_computes_what_dense_weights_do(
    native: Native, tmp_path: Path
) -> None:
    """A mix like Q4_K_M; no weight is rounded, and q, k and v are one product."""
    model, config = random_model("qwen2", hidden_size=256, intermediate_size=512)
    tensors = tensors_of(model, config)
    kinds = {"token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K"}
    kinds |= {"ffn_down": "Q6_K", "ffn_gate": "Q3_K", "ffn_up": "Q2_K", "attn_output": "Q5_K"}
    for seed, (name, value) in enumerate(tensors.items()):
        kind = next((k for part, k in kinds.items() if name.endswith(f"{part}.weight")), None)
        if kind is not None and not isinstance(value, RawTensor):
            rows, columns = value.shape
            tensors[name], _ = blocks(Type[kind], (rows, columns), seed)
    path = write_gguf(tmp_path / "q.gguf", metadata_of(config), tensors)
    dense, _ = load_gguf(read_header(path), mx.float32)
    expected = dense(TOKENS)
    stored, _ = load_gguf(read_header(path), None, has_kernels=True)
    replaced = replace_modules(stored, native)
    products = {replaced.layers[0].self_attn[name].product for name in ("q_proj", "v_proj")}
    assert len(products) == 1
    assert mx.abs(replaced(TOKENS) - expected).max() <= 2e-5 * mx.abs(expected).max()

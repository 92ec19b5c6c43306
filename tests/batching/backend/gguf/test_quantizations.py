"""Every type of tensor that `gguf` dequantizes: the same weights, or without kernels 8 bits of some."""

import re
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from batching.backend.gguf.file import quantizations
from batching.backend.gguf.file.quantizations import Weight, join, outline_weight, read_weight
from batching.backend.gguf.storage import num_bytes, stored_tensors
from batching.backend.weights.storage import storage_line
from batching.model_files.gguf_formats import EIGHT_BITS, FORMATS, KERNEL_FORMATS, Format, format_of
from batching.model_files.gguf_header import GgufHeader, read_header
from tests.support.gguf_models import Array, blocks
from tests.support.gguf_writer import F16, RawTensor, write_gguf

SHAPE: Final = (7, 512)
# The scale of a group is a product.
OF_PRODUCTS: Final = ("Q4_K", "Q5_K", "IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_XS")
# Without the kernels.
LOSSY: Final = ("Q2_K", "Q3_K", "Q6_K", "IQ1_M", "IQ2_XS", "IQ2_S")


def written(tmp_path: Path, name: str) -> tuple[GgufHeader, Array]:
    raw, expected = blocks(GGMLQuantizationType[name], SHAPE, 3)
    return read_header(write_gguf(tmp_path / "t.gguf", {}, {"t.weight": raw})), expected


def dequantized(weight: Weight) -> Array:
    """Dequantize in float32."""
    parts = {
        n: p.astype(mx.float32) if p.dtype == mx.float16 else p for n, p in weight.parts.items()
    }
    return np.array(Weight(parts, weight.format).dense().astype(mx.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_a_type_that_mlx_has_a_format_for_is_the_same(tmp_path: Path, name: str) -> None:
    header, expected = written(tmp_path, name)
    weight = read_weight(header, "t.weight", None)
    # The last bit: MLX multiplies and adds in one rounding or two.
    np.testing.assert_allclose(
        dequantized(weight), expected, rtol=0, atol=2e-7 * float(np.ptp(expected))
    )
    assert weight.format == format_of(name)
    if name not in OF_PRODUCTS:
        assert sum(part.nbytes for part in weight.parts.values()) == num_bytes(header, None)


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_for_the_kernels_every_type_is_the_same(tmp_path: Path, name: str) -> None:
    header, expected = written(tmp_path, name)
    weight = read_weight(header, "t.weight", None, has_kernels=True)
    assert weight.format == KERNEL_FORMATS[name] == format_of(name, has_kernels=True)
    np.testing.assert_allclose(
        dequantized(weight), expected, rtol=0, atol=2e-7 * float(np.ptp(expected))
    )


def test_a_scale_that_is_no_number_is_none_of_a_weight_either(tmp_path: Path) -> None:
    raw, _ = blocks(GGMLQuantizationType.IQ3_S, SHAPE, 3)
    damaged = RawTensor(raw.kind, SHAPE, np.float16(np.nan).tobytes() + raw.content[2:])
    header = read_header(write_gguf(tmp_path / "t.gguf", {}, {"t.weight": damaged}))
    weight = read_weight(header, "t.weight", None, has_kernels=True)
    assert np.isnan(dequantized(weight)).sum() == 256


KEPT_BY_KERNELS: Final = ("F32", "BF16", "Q4_0", "Q4_1", "Q4_K", "Q8_0", "MXFP4")


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_what_the_kernels_keep_in_another_way_is_named_with_its_cost(
    tmp_path: Path, name: str
) -> None:
    header, _ = written(tmp_path, name)
    line = storage_line(stored_tensors(header, None, has_kernels=True))
    if name in KEPT_BY_KERNELS:
        assert line == ""
        return
    assert line.startswith(f"{name} (1 tensors, 1 MiB) as ")
    assert "(exact, " in line
    assert re.search(r": \d+\.\d times the bytes in each decode step$", line)


def test_floats_that_the_kernels_keep_in_another_way(tmp_path: Path) -> None:
    header = read_header(
        write_gguf(tmp_path / "t.gguf", {}, {"t.weight": RawTensor(F16, SHAPE, bytes(2 * 7 * 512))})
    )
    line = storage_line(stored_tensors(header, None, has_kernels=True))
    assert line == (
        "F16 (1 tensors, 1 MiB) as float32 (exact, 1 MiB): 2.0 times the bytes in each decode step"
    )
    assert storage_line(stored_tensors(header, None, has_kernels=False)) == ""
    halved = storage_line(stored_tensors(header, mx.bfloat16, has_kernels=False))
    assert "as bfloat16 (rounded, 1 MiB): 1.0 times" in halved


def test_floats_of_an_architecture_whose_activations_exceed_float16(tmp_path: Path) -> None:
    matrix = RawTensor(F16, SHAPE, bytes(2 * 7 * 512))
    header = read_header(
        write_gguf(tmp_path / "t.gguf", {"general.architecture": "gemma3"}, {"t.weight": matrix})
    )
    line = storage_line(stored_tensors(header, None, has_kernels=False))
    assert "as bfloat16 (rounded, 1 MiB): 1.0 times" in line


@pytest.mark.parametrize("name", LOSSY)
def test_other_types_become_8_bits_and_no_weight_moves_by_more_than_half_a_step(
    tmp_path: Path, name: str
) -> None:
    header, expected = written(tmp_path, name)
    weight = read_weight(header, "t.weight", None)
    assert weight.format == EIGHT_BITS
    groups = expected.reshape(*SHAPE[:-1], -1, 32)
    steps = np.repeat(np.ptp(groups, axis=-1) / 255, 32, axis=-1)
    rounding = np.abs(expected).max() / 1024
    assert (np.abs(dequantized(weight) - expected) <= steps / 2 + rounding).all()
    line = storage_line(stored_tensors(header, None, has_kernels=False))
    assert f"{name} (1 tensors, 1 MiB) as 8 bits (rounded" in line
    np.testing.assert_array_equal(read_weight(header, "t.weight", mx.float32).dense(), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_K", "Q6_K", "MXFP4"])
def test_a_tensor_is_converted_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    header, _ = written(tmp_path, name)
    whole = read_weight(header, "t.weight", None)
    monkeypatch.setattr(quantizations, "_MAX_WEIGHTS", 3 * SHAPE[1])
    in_pieces = read_weight(header, "t.weight", None)
    assert in_pieces.parts.keys() == whole.parts.keys()
    assert all(mx.array_equal(in_pieces.parts[part], whole.parts[part]) for part in whole.parts)


def test_a_group_of_equal_weights_stays_what_it_is() -> None:
    weight = quantizations.quantize(mx.full((2, 64), 0.25))
    np.testing.assert_array_equal(dequantized(weight), np.full((2, 64), 0.25))


@pytest.mark.parametrize(("second", "kept"), [("Q5_0", FORMATS["Q5_0"]), ("Q8_0", EIGHT_BITS)])
def test_joined_rows_keep_their_format_if_it_is_one(
    tmp_path: Path, second: str, kept: Format
) -> None:
    header, expected = written(tmp_path, "Q5_0")
    one = read_weight(header, "t.weight", None)
    header, other = written(tmp_path, second)
    both = join(one, read_weight(header, "t.weight", None))
    assert both.format == kept
    np.testing.assert_allclose(dequantized(both), np.concatenate([expected, other]), atol=1e-2)


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("dtype", [None, mx.bfloat16])
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_the_outline_of_a_type_is_what_reading_it_gives(
    tmp_path: Path, name: str, dtype: mx.Dtype | None, has_kernels: bool
) -> None:
    header, _ = written(tmp_path, name)
    outlined, read = (
        f(header, "t.weight", dtype, has_kernels=has_kernels) for f in (outline_weight, read_weight)
    )
    assert outlined.format == read.format
    shapes = [{n: (p.shape, p.dtype) for n, p in w.parts.items()} for w in (outlined, read)]
    assert shapes[0] == shapes[1]

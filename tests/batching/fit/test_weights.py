"""The bytes of weights, by who computes; tests/batching/backend/test_fit.py has real files."""

from typing import Any

from batching.fit.weights import Compute, weight_bytes
from batching.model_files.description import ModelDescription
from batching.model_files.tensor import StoredTensor
from tests.support.rows import rows

STORED, KERNELS, FLOATS = Compute


def model(*tensors: StoredTensor, is_gguf: bool = False, **config: Any) -> ModelDescription:
    return ModelDescription(None, config, tensors, 0, is_gguf=is_gguf)


def dense(type_name: str, width: int) -> StoredTensor:
    return StoredTensor("a.weight", type_name, (10, 10), 100 * width)


def quantized(
    name: str = "a", bits: int = 4, parameters: str = "scales biases"
) -> list[StoredTensor]:
    """Return 64 x 64 weights in groups of 32."""
    weight = StoredTensor(f"{name}.weight", "U32", (64, 2 * bits), 512 * bits)
    return [
        weight,
        *(StoredTensor(f"{name}.{part}", "BF16", (64, 2), 256) for part in parameters.split()),
    ]


@rows(
    ("tensor", "stored", "kernels", "floats"),
    [
        (dense("BF16", 2), 200, 200, 400),
        (dense("F16", 2), 200, 400, 400),
        (dense("F32", 4), 400, 400, 400),
        # mlx-lm makes bfloat16 of 8 bits.
        (dense("F8_E4M3", 1), 200, 200, 400),
        # Integers are left, or are weights packed into them.
        (StoredTensor("a.qweight", "I32", (10, 10), 400), 400, 400, 1600),
    ],
)
def test_floats(tensor: StoredTensor, stored: int, kernels: int, floats: int) -> None:
    found = [weight_bytes(model(tensor), compute) for compute in Compute]
    assert found == [stored, kernels, floats]


def test_a_dtype_counts_whoever_computes() -> None:
    found = [weight_bytes(model(dense("F32", 4)), compute, "float16") for compute in Compute]
    # The kernels keep float16 as float32.
    assert found == [200, 400, 200]


def test_packed_weights_say_how_many_bits_they_have() -> None:
    packed = StoredTensor("a.qweight", "I32", (10, 10), 400)
    described = model(packed, quantization_config={"bits": 4})
    assert weight_bytes(described, FLOATS) == 3200


@rows(
    ("tensors", "settings", "stored", "kernels", "floats"),
    [
        (quantized(), {"group_size": 32}, 2048 + 512, 2048 + 512, 4096 * 4),
        (quantized(bits=3), {"group_size": 32}, 1536 + 512, 2048 + 512, 4096 * 4),
        (quantized(bits=6), {"group_size": 32}, 3072 + 512, 4096 + 512, 4096 * 4),
        (quantized(), {"group_size": 64, "a": {"group_size": 32}}, 2560, 2560, 4096 * 4),
        (quantized(), {"group_size": 64, "a": False}, 2560, 4096 + 512, 8192 * 4),
        (quantized("embed_q"), {"group_size": 32}, 2560, 4096 * 4 + 512, 4096 * 4),
        (
            quantized(parameters="scales"),
            {"group_size": 32, "mode": "mxfp4"},
            2304,
            2304,
            4096 * 2,
        ),
        (
            quantized(parameters="scales"),
            {"group_size": 32, "mode": "nvfp4"},
            2304,
            4096 * 2,
            4096 * 2,
        ),
        # What a foreign config says need not be of any type.
        (quantized(), [], 2560, 4096 + 512, 8192 * 4),
        (quantized(), {"group_size": "x"}, 2560, 4096 + 512, 8192 * 4),
    ],
)
def test_quantized_weights(
    tensors: list[StoredTensor], settings: Any, stored: int, kernels: int, floats: int
) -> None:
    described = model(*tensors, quantization=settings)
    assert [weight_bytes(described, compute) for compute in Compute] == [stored, kernels, floats]


@rows(
    ("type_name", "stored", "kernels", "floats"),
    [
        ("Q4_0", 5, 5, 32),
        ("Q6_K", 9, 8.625, 32),
        ("NVFP4", 4.5, 16, 32),
        ("F16", 16, 32, 32),
        ("BF16", 16, 16, 32),
        # All that a file has is of 32 bits.
        ("F32", 32, 32, 32),
    ],
)
def test_gguf_files(type_name: str, stored: float, kernels: float, floats: float) -> None:
    described = model(StoredTensor("a.weight", type_name, (8, 256), 0), is_gguf=True)
    found = [8 * weight_bytes(described, compute) / 2048 for compute in Compute]
    assert found == [stored, kernels, floats]


def test_norms_of_32_bits_become_halves_beside_quantized_weights() -> None:
    norm = StoredTensor("n.weight", "F32", (100,), 400)
    weight = StoredTensor("a.weight", "Q8_0", (1, 32), 34)
    assert weight_bytes(model(norm, weight, is_gguf=True), STORED) == 200 + 36

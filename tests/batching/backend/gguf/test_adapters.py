"""An adapter on the model of a GGUF file adds what it adds to the model that the file was made from."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from batching.adapters.adapter import AdaptableLayer, AdaptableLayers
from batching.adapters.files.adapter_file import AdapterFile
from batching.adapters.files.fitting import fitted
from batching.adapters.low_rank import LowRank
from batching.backend.gguf.model import GgufOutline
from batching.model_files.gguf_header import read_header
from tests.support.adapter_files import peft_tensors, write_peft
from tests.support.gguf_architectures import TINY, VARIANTS, Array
from tests.support.gguf_converter import random_model, write_model

TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])


def adapted(model: nn.Module) -> dict[str, nn.Linear]:
    layers = [(path, module) for path, module in model.named_modules() if "lm_head" not in path]
    return {path: module for path, module in layers if isinstance(module, nn.Linear)}


def random_adapter(model: nn.Module) -> dict[str, tuple[Array, Array]]:
    rng = np.random.default_rng(5)

    def matrix(*shape: int) -> Array:
        return rng.uniform(-0.2, 0.2, shape).astype(np.float32)

    sizes = {path: layer.weight.shape for path, layer in adapted(model).items()}
    return {path: (matrix(inputs, 2), matrix(2, outs)) for path, (outs, inputs) in sizes.items()}


def add(model: nn.Module, numbers: dict[str, LowRank]) -> None:
    for path, layer in adapted(model).items():
        each = numbers[path]
        layer.weight = layer.weight + (mx.array(each.a) @ mx.array(each.b)).T


def read_file(path: Path) -> tuple[nn.Module, AdaptableLayers]:
    outline = GgufOutline(read_header(path), mx.float32)
    outline.read_all()
    sizes = {path: layer.weight.shape for path, layer in adapted(outline.model).items()}
    layers = {path: AdaptableLayer(inputs, outputs) for path, (outputs, inputs) in sizes.items()}
    return outline.model, AdaptableLayers(layers, {}, 8)


@pytest.mark.parametrize("name", ["llama", "qwen2", "granite", "phi3", "glm4", "glm-4.6v"])
def test_an_adapter_of_a_files_model(tmp_path: Path, name: str) -> None:
    tiny = {**TINY, **VARIANTS}[name]
    model, config = random_model(tiny)
    adapter = random_adapter(model)
    folder = write_peft(tmp_path / "style", peft_tensors(adapter), r=2, lora_alpha=4)
    base, layers = read_file(write_model(tmp_path / "base.gguf", tiny, model, config))
    add(base, fitted(AdapterFile(folder, "style"), layers))
    before = model(TOKENS)
    add(model, {path: LowRank(a, 2 * b) for path, (a, b) in adapter.items()})
    merged, _ = read_file(write_model(tmp_path / "merged.gguf", tiny, model, config))
    expected = merged(TOKENS)
    assert distance(base(TOKENS), expected) < 1e-4
    assert distance(model(TOKENS), expected) < 1e-4
    assert distance(before, expected) > 0.1


def test_an_adapter_of_a_quantized_file(tmp_path: Path) -> None:
    tiny = TINY["llama"]
    model, config = random_model(tiny)
    adapter = random_adapter(model)
    folder = write_peft(tmp_path / "style", peft_tensors(adapter), r=2, lora_alpha=4)
    path = write_model(tmp_path / "base.gguf", tiny, model, config, in_8_bits)
    base, layers = read_file(path)
    add(base, fitted(AdapterFile(folder, "style"), layers))
    add(model, {path: LowRank(a, 2 * b) for path, (a, b) in adapter.items()})
    assert distance(base(TOKENS), model(TOKENS)) < 0.05


def in_8_bits(_: str, value: Array) -> Type:
    return Type.F32 if value.ndim < 2 or value.shape[-1] % 32 else Type.Q8_0


def distance(found: mx.array, expected: mx.array) -> float:
    """Return how far apart logits are, relative to the largest."""
    return float(mx.abs(found - expected).max() / mx.abs(expected).max())

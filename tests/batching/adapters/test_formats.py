"""Adapters of mlx-lm and of PEFT: what they add to a layer."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from batching.adapters.files.adapter_file import AdapterFile
from batching.adapters.files.matrices import LayerSizes
from batching.errors import AdapterError
from tests.support.adapter_files import (
    Q_PROJ,
    V_PROJ,
    mlx_lm_tensors,
    peft_tensors,
    random_layers,
    write_mlx_lm,
    write_peft,
)
from tests.support.gguf_architectures import TINY
from tests.support.gguf_converter import random_model
from tests.support.rows import rows

LAYERS = random_layers()


def test_an_adapter_of_mlx_lm(tmp_path: Path) -> None:
    file = AdapterFile(write_mlx_lm(tmp_path, mlx_lm_tensors(LAYERS)), "style")
    assert str(file.adapter) == "style"
    assert file.adapter.path == str(tmp_path)
    assert file.adapter.rank == 2
    assert file.layers == {Q_PROJ: LayerSizes(6, 8, 2), V_PROJ: LayerSizes(6, 4, 2)}
    assert file.num_bytes == 4 * (12 + 16 + 12 + 8)
    for path, numbers in file.read().items():
        a, b = LAYERS[path]
        np.testing.assert_array_equal(numbers.a, a)
        np.testing.assert_array_equal(numbers.b, 20 * b)
        assert numbers.a.dtype == numbers.b.dtype == np.float32
        assert numbers.dtype == "F32"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_mlx_lm_saves_adds_what_mlx_lm_adds(tmp_path: Path, dtype: mx.Dtype) -> None:
    model, _ = random_model(TINY["llama"])
    plain = dict(model.named_modules())
    parameters = {"rank": 4, "scale": 2.5, "dropout": 0.0}
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters})
    )
    model.freeze()
    linear_to_lora_layers(model, 2, parameters)
    trained: Any = tree_flatten(model.trainable_parameters())
    drawn = {name: mx.random.normal(array.shape).astype(dtype) for name, array in trained}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), drawn)
    numbers = AdapterFile(tmp_path, "style").read()
    theirs = dict(load_adapters(random_model(TINY["llama"])[0], str(tmp_path)).named_modules())
    assert len(numbers) == 14
    for path, each in numbers.items():
        layer: Any = plain[path]
        x = mx.random.normal((3, layer.weight.shape[1]))
        ours = layer(x) + x @ mx.array(each.a) @ mx.array(each.b)
        assert mx.allclose(ours, theirs[path](x), atol=1e-3, rtol=1e-3)
        assert isinstance(layer, nn.Linear)


@rows("adapter", ["", ".default"])
def test_an_adapter_of_peft(adapter: str, tmp_path: Path) -> None:
    file = AdapterFile(write_peft(tmp_path, peft_tensors(LAYERS, adapter)), "style")
    assert file.layers == {Q_PROJ: LayerSizes(6, 8, 2), V_PROJ: LayerSizes(6, 4, 2)}
    for path, numbers in file.read().items():
        a, b = LAYERS[path]
        np.testing.assert_array_equal(numbers.a, a)
        np.testing.assert_array_equal(numbers.b, 3 * b)
        assert numbers.a.flags.c_contiguous
        assert numbers.b.flags.c_contiguous


@rows("dtype", ["F32", "F16", "BF16"])
def test_all_types_of_numbers_are_read(dtype: str, tmp_path: Path) -> None:
    folder = write_peft(tmp_path, peft_tensors(LAYERS), dtype=dtype)
    numbers = AdapterFile(folder, "style").read()[Q_PROJ]
    np.testing.assert_array_equal(numbers.a, LAYERS[Q_PROJ][0])
    assert numbers.dtype == dtype


def test_matrices_of_two_types_are_said_to_have_the_wider_one(tmp_path: Path) -> None:
    tensors: Any = {"x.lora_a": np.ones((2, 1)), "x.lora_b": np.ones((1, 2))}
    folder = write_mlx_lm(tmp_path, tensors)
    content = (folder / "adapters.safetensors").read_bytes()
    content = content.replace(
        b'"F32", "shape": [1, 2], "data_offsets": [8, 16]',
        b'"F16", "shape": [1, 2], "data_offsets": [8, 12]',
    )
    (folder / "adapters.safetensors").write_bytes(content[:-4])
    numbers = AdapterFile(folder, "style").read()["x"]
    assert (numbers.b.shape, numbers.dtype) == ((1, 2), "F32")


# Of q_proj and v_proj; alpha is 6 and r is 2.
@rows(
    ("config", "of_q", "of_v"),
    [
        ({}, 3, 3),
        ({"use_rslora": True}, 6 / 2**0.5, 6 / 2**0.5),
        ({"lora_alpha": -4}, -2, -2),
        ({"lora_alpha": 0.5}, 0.25, 0.25),
        ({"alpha_pattern": {"q_proj": 8}}, 4, 3),
        ({"alpha_pattern": {"layers.1.self_attn.v_proj": 8}}, 3, 4),
        ({"alpha_pattern": {"proj": 8}}, 3, 3),
        ({"alpha_pattern": {"model": 8, "layers": 8}}, 3, 3),
        ({"alpha_pattern": {"self_attn.*": 8}}, 4, 4),
        ({"alpha_pattern": {"^self_attn.q_proj": 8}}, 3, 3),
        ({"alpha_pattern": {"^model.layers.0.*": 8}}, 4, 3),
        ({"alpha_pattern": {"(q|v)_proj": 8, "v_proj": 10}}, 4, 4),
        ({"alpha_pattern": {"v_proj": 10, "(q|v)_proj": 8}}, 4, 5),
        ({"rank_pattern": {"q_proj": 2, ".*v_proj": 2}, "r": 9}, 3, 3),
        ({"rank_pattern": None, "alpha_pattern": None, "init_lora_weights": "gaussian"}, 3, 3),
    ],
)
def test_how_peft_scales(config: dict[str, Any], of_q: float, of_v: float, tmp_path: Path) -> None:
    file = AdapterFile(write_peft(tmp_path, peft_tensors(LAYERS), **config), "style")
    numbers = file.read()
    for path, scale in ((Q_PROJ, of_q), (V_PROJ, of_v)):
        np.testing.assert_allclose(numbers[path].b, np.float32(scale) * LAYERS[path][1])


def test_ranks_may_differ(tmp_path: Path) -> None:
    layers = {Q_PROJ: LAYERS[Q_PROJ], V_PROJ: random_layers(rank=4)[V_PROJ]}
    folder = write_peft(tmp_path, peft_tensors(layers), rank_pattern={"v_proj": 4})
    file = AdapterFile(folder, "style")
    assert file.adapter.rank == 4
    np.testing.assert_array_equal(file.read()[V_PROJ].b, 1.5 * layers[V_PROJ][1])
    with pytest.raises(
        AdapterError, match=f"has {V_PROJ} with rank 4, and adapter_config.json says 2"
    ):
        AdapterFile(write_peft(tmp_path / "other", peft_tensors(layers)), "style")


def test_the_same_contents_are_the_same_adapter(tmp_path: Path) -> None:
    def opened(name: str, seed: int = 1, **config: Any) -> Any:
        folder = write_peft(tmp_path / name, peft_tensors(random_layers(seed)), **config)
        return AdapterFile(folder, name).adapter

    one = opened("one")
    assert opened("two") == one
    # Neither matters to what is computed.
    assert opened("three", lora_dropout=0.5, base_model_name_or_path="other/base") == one
    others = [
        opened("alpha", lora_alpha=7),
        opened("stabilized", use_rslora=True),
        opened("pattern", alpha_pattern={"q_proj": 7}),
        opened("weights", seed=2),
    ]
    assert len({one.digest, *(each.digest for each in others)}) == 5

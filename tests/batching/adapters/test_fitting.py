"""Which layers of a model an adapter's are, and what does not fit is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from batching.adapters.adapter import AdaptableLayer, AdaptableLayers
from batching.adapters.files.adapter_file import AdapterFile
from batching.adapters.files.fitting import fit, fitted
from batching.errors import AdapterError
from tests.support.adapter_files import (
    Q_PROJ,
    mlx_lm_tensors,
    peft_tensors,
    random_layers,
    write_mlx_lm,
    write_peft,
)
from tests.support.rows import rows

SIZES: Final = AdaptableLayer(6, 8)


def adapter(
    folder: Path, *names: str, rank: int = 2, inputs: int = 6, outputs: int = 8
) -> AdapterFile:
    a, b = np.ones((inputs, rank)), np.arange(rank * outputs).reshape(rank, outputs)
    layers: dict[str, Any] = dict.fromkeys(names, (a, b))
    parameters = {"scale": 1.0}
    return AdapterFile(
        write_mlx_lm(folder, mlx_lm_tensors(layers), lora_parameters=parameters), "style"
    )


def model(*paths: str, refused: dict[str, str] | None = None, max_rank: int = 8) -> AdaptableLayers:
    return AdaptableLayers(dict.fromkeys(paths, SIZES), refused or {}, max_rank)


def test_adapters_of_peft_do_not_fit_weights_that_were_multiplied(tmp_path: Path) -> None:
    layers = replace(model(Q_PROJ), takes_peft=False)
    of_peft = AdapterFile(write_peft(tmp_path / "peft", peft_tensors(random_layers(1))), "style")
    with pytest.raises(
        AdapterError, match="the adapter style does not fit the model: PEFT trained"
    ):
        fit(of_peft, layers)
    assert fit(adapter(tmp_path / "mlx", Q_PROJ), layers) == {Q_PROJ: Q_PROJ}


@rows(
    ("name", "path"),
    [
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"),
        ("model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"),
        ("language_model.model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("transformer.h.0.attn.c_attn", "model.h.0.attn.c_attn"),
        ("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_attn"),
        ("encoder.layer.0.output.dense", "encoder.layer.0.output.dense"),
        ("projector.linear_1", "projector.linear_1"),
    ],
)
def test_names_and_paths(name: str, path: str, tmp_path: Path) -> None:
    layers = model(path, "model.layers.1.mlp.up_proj", "vision_tower.layers.0.mlp.up_proj")
    file = adapter(tmp_path, name)
    assert fit(file, layers) == {path: name}
    assert fitted(file, layers)[path].b.tolist() == file.read()[name].b.tolist()


@rows(
    ("name", "paths"),
    [
        ("model.layers.2.mlp.up_proj", ["model.layers.1.mlp.up_proj"]),
        ("model.layers.0.mlp.up_proj", ["model.h.0.mlp.up_proj"]),
        ("model.layers.0.mlp.up_proj", ["vision_tower.layers.0.mlp.up_proj"]),
        ("vision_tower.encoder.layers.0.mlp.up_proj", ["model.layers.0.mlp.up_proj"]),
        ("visual.blocks.0.attn.qkv", ["model.layers.0.mlp.up_proj"]),
        ("layers.0.up", ["model.layers.0.up", "decoder.layers.0.up"]),
        ("0.up", ["model.layers.0.up"]),
        ("projector", ["model.layers.0.up"]),
    ],
)
def test_layers_that_the_model_has_not(name: str, paths: list[str], tmp_path: Path) -> None:
    with pytest.raises(AdapterError) as caught:
        fit(adapter(tmp_path, name), model(*paths))
    assert str(caught.value) == (
        f"the adapter style does not fit the model: {name} is no layer of the model"
    )


@rows(
    ("sizes", "reason"),
    [
        ({"inputs": 2048}, "has 2048 inputs, the model's has 6"),
        ({"outputs": 9}, "has 9 outputs, the model's has 8"),
        ({"rank": 64}, "has rank 64; the limit is 8"),
    ],
)
def test_sizes_that_differ(sizes: dict[str, int], reason: str, tmp_path: Path) -> None:
    path = "model.layers.0.mlp.up_proj"
    file = adapter(tmp_path, path, **sizes)
    for attempt in fit, fitted:
        with pytest.raises(AdapterError) as caught:
            attempt(file, model(path))
        assert str(caught.value) == f"the adapter style does not fit the model: {path} {reason}"


def test_layers_that_are_refused(tmp_path: Path) -> None:
    file = adapter(tmp_path, "model.layers.0.self_attn.kv_b_proj")
    refused = {"language_model.model.layers.0.self_attn.kv_b_proj": "it is absorbed"}
    with pytest.raises(AdapterError, match="kv_b_proj is not served: it is absorbed"):
        fit(file, model(refused=refused))


def test_two_names_of_a_layer(tmp_path: Path) -> None:
    path = "model.layers.0.up"
    with pytest.raises(AdapterError, match=f"{path} and layers.0.up are the same layer"):
        fit(adapter(tmp_path, "layers.0.up", path), model(path))

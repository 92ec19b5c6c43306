"""Files of encoders that do not fit together are rejected in a line that names what is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from batching.errors import ModelLoadError
from tests.support.encoder_files import write_cross_encoder, write_encoder
from tests.support.model_files import edit_config

Arrays = dict[str, mx.array]


def refused(directory: Path, **settings: Any) -> str:
    config = EngineConfig(model=str(directory), model_id="tiny", device="cpu", **settings)
    with pytest.raises(ModelLoadError) as caught:
        build_engine(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [
        ("bert", {"hidden_size": "48"}, "hidden_size in its config is '48', and no number above 0"),
        ("bert", {"num_hidden_layers": 10**9}, "its config declares 1000000000 layers"),
        ("bert", {"num_attention_heads": 5}, "hidden_size 48 is no multiple of its 5 heads"),
        ("bert", {"layer_norm_eps": -1}, "layer_norm_eps in its config is -1"),
        ("bert", {"hidden_act": "silu"}, "hidden_act in its config is 'silu'"),
        ("bert", {"position_embedding_type": "relative_key"}, "its positions are relative_key"),
        ("bert", {"is_decoder": True}, "it is_decoder by its config"),
        ("bert", {"num_hidden_layers": 4}, "no tensor encoder.layer.3.attention.self.query.weight"),
        (
            "roberta",
            {"intermediate_size": 81},
            "is of shape [80, 48], and its config says [81, 48]",
        ),
        (
            "modernbert",
            {"layer_types": ["full_attention"]},
            "layer_types in its config are not one",
        ),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters of full_attention in its config are not supported",
        ),
    ],
)
def test_a_config_is_checked(tmp_path: Path, kind: str, changes: dict[str, Any], line: str) -> None:
    assert line in refused(write_encoder(tmp_path, kind, **changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, "it tells 2 labels apart"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "the activation Tanh of its scores is not supported",
        ),
    ],
)
def test_a_cross_encoder_has_one_score(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    assert line in refused(write_cross_encoder(tmp_path, "bert", **changes))


def _quantized(arrays: Arrays) -> None:
    name = "embeddings.word_embeddings.weight"
    arrays[name] = mx.zeros(arrays[name].shape, mx.uint32)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (
            lambda arrays: arrays.pop("embeddings.LayerNorm.bias"),
            "no tensor embeddings.LayerNorm.bias",
        ),
        (_quantized, "embeddings.word_embeddings.weight is quantized"),
    ],
)
def test_weights_are_checked(tmp_path: Path, damage: Callable[[Arrays], Any], line: str) -> None:
    path = write_encoder(tmp_path, "bert") / "model.safetensors"
    arrays: Any = mx.load(str(path))
    mx.eval(arrays)
    damage(arrays)
    mx.save_safetensors(str(path), arrays)
    assert line in refused(tmp_path)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    directory = write_cross_encoder(tmp_path, "bert")
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    assert "it has no model*.safetensors" in refused(directory)
    (directory / "other.safetensors").rename(directory / "model.safetensors")
    edit_config(directory, "tokenizer.json", post_processor=None)
    (directory / "tokenizer.json").write_text("{", encoding="utf-8")
    assert "cannot load" in refused(directory)


def test_former_names_of_norms_and_configs_are_read(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "bert", "bert")
    path = directory / "model.safetensors"
    arrays: Any = mx.load(str(path))
    mx.eval(arrays)
    former = {
        f"bert.{name.replace('Norm.weight', 'Norm.gamma').replace('Norm.bias', 'Norm.beta')}": array
        for name, array in arrays.items()
    }
    mx.save_safetensors(str(path), former)
    modern = write_encoder(tmp_path / "modern", "modernbert")
    edit_config(modern, layer_types=None, rope_parameters=None)
    for each in (directory, modern):
        build_engine(EngineConfig(model=str(each), model_id="tiny", device="cpu")).close()

"""What the files of a model say about embeddings and reranking."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.pooling.description import (
    NO_DESCRIPTION,
    Description,
    Pipeline,
    describe_directory,
    describe_file,
)
from batching.errors import ModelLoadError
from batching.model_files.gguf_header import read_header
from batching.pooling import NoEmbeddings, PoolingType
from tests.support.gguf_writer import write_gguf

Module = tuple[str, str, dict[str, Any]]

TRANSFORMER: Module = ("Transformer", "", {})
POOLING: Module = ("Pooling", "1_Pooling", {"pooling_mode": "mean"})
NORMALIZE: Module = ("Normalize", "2_Normalize", {})
DENSE = {"activation_function": "torch.nn.modules.linear.Identity"}


def described(path: Path, *modules: Module, **files: dict[str, Any]) -> Description:
    """Return what a directory says that lists modules: their kinds, folders and configs."""
    listed = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, folder, _) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    for _, folder, config in modules:
        (path / folder).mkdir(exist_ok=True)
        (path / folder / "config.json").write_text(json.dumps(config))
    for name, config in files.items():
        (path / f"{name}.json").write_text(json.dumps(config))
    return describe_directory(path)


def pipeline(path: Path, *modules: Module, **files: dict[str, Any]) -> Pipeline:
    found = described(path, *modules, **files).pipeline
    assert isinstance(found, Pipeline)
    return found


def refusal(path: Path, *modules: Module) -> str:
    found = described(path, *modules).pipeline
    assert isinstance(found, NoEmbeddings)
    assert found.is_described
    return found.reason


def test_a_directory_without_modules_says_nothing(tmp_path: Path) -> None:
    assert describe_directory(tmp_path) is NO_DESCRIPTION


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode": "lasttoken"}, PoolingType.LAST),
        ({"pooling_mode": ["cls"]}, PoolingType.CLS),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, PoolingType.MEAN),
        ({"pooling_mode_cls_token": True}, PoolingType.CLS),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, PoolingType.LAST),
        ({"word_embedding_dimension": 8}, PoolingType.MEAN),
    ],
)
def test_a_pooling_is_a_word_or_a_flag(
    tmp_path: Path, config: dict[str, Any], pooling: PoolingType
) -> None:
    found = pipeline(tmp_path, TRANSFORMER, ("Pooling", "1_Pooling", config))
    assert (found.pooling, found.is_normalized) == (pooling, False)


def test_all_that_surrounds_the_pooling_is_read(tmp_path: Path) -> None:
    found = pipeline(
        tmp_path,
        TRANSFORMER,
        POOLING,
        NORMALIZE,
        sentence_bert_config={"max_seq_length": 40},
        config_sentence_transformers={"prompts": {"q": "Q:"}, "default_prompt_name": "q"},
    )
    assert found == Pipeline(
        pooling=PoolingType.MEAN,
        is_normalized=True,
        max_tokens=40,
        prompts={"q": "Q:"},
        default_prompt="q",
    )


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([TRANSFORMER], "has no pooling after its first module in modules.json"),
        ([("StaticEmbedding", "", {}), POOLING], "has no pooling after its first module"),
        ([TRANSFORMER, NORMALIZE], "has no pooling after its first module"),
        ([TRANSFORMER, ("Pooling", "p", {"pooling_mode": "max"})], "has the pooling max, which is"),
        (
            [TRANSFORMER, ("Pooling", "p", {"pooling_mode": ["cls", "mean"]})],
            "has the pooling cls and mean, which is",
        ),
        (
            [TRANSFORMER, ("Pooling", "p", {"pooling_mode": "mean", "include_prompt": False})],
            "leaves prompts out of its pooling",
        ),
        ([TRANSFORMER, POOLING, ("LSTM", "l", {})], "has a module LSTM, which is not supported"),
        ([TRANSFORMER, POOLING, NORMALIZE, NORMALIZE], "has a module Normalize, which is not"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, modules: list[Module], reason: str) -> None:
    assert refusal(tmp_path, *modules).startswith(reason)


def test_dense_layers_are_read_in_float32(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    weight = mx.arange(6, dtype=mx.bfloat16).reshape(2, 3)
    mx.save_safetensors(str(tmp_path / "d" / "model.safetensors"), {"linear.weight": weight})
    (layer,) = pipeline(tmp_path, TRANSFORMER, POOLING, ("Dense", "d", DENSE)).head.dense
    assert layer.weight.dtype == np.float32
    assert layer.weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (layer.bias, layer.activation) == (None, "Identity")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DENSE, "the dense layer in d has no model.safetensors"),
        ({"activation_function": "torch.nn.GELU"}, "the activation GELU of its dense layer"),
        (DENSE | {"use_residual": True}, "the dense layer in d is no plain one"),
        (DENSE | {"module_input_name": "token_embeddings"}, "the dense layer in d is no plain one"),
    ],
)
def test_a_dense_layer_that_cannot_be_computed_is_an_error(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        described(tmp_path, TRANSFORMER, POOLING, ("Dense", "d", config))


def test_a_default_prompt_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its default prompt q is not among its prompts"):
        described(
            tmp_path,
            TRANSFORMER,
            POOLING,
            config_sentence_transformers={"default_prompt_name": "q"},
        )


def test_folders_outside_of_the_models_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="names a folder outside"):
        described(tmp_path / "model", TRANSFORMER, ("Pooling", "../1_Pooling", {}))


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"true_token_id": 3, "false_token_id": 4}, (3, 4)),
        ({"true_token_id": 3, "false_token_id": None}, None),
    ],
)
def test_a_reranker_names_its_tokens(
    tmp_path: Path, config: dict[str, Any], ids: tuple[int, int] | None
) -> None:
    found = described(tmp_path, TRANSFORMER, ("LogitScore", "1_LogitScore", config))
    assert found.rerank_ids == ids
    assert found.pipeline == NoEmbeddings("is a reranker, and makes no embeddings")


def of_file(path: Path, **metadata: Any) -> Description:
    values = {"general.architecture": "qwen3"} | {f"qwen3.{k}": v for k, v in metadata.items()}
    return describe_file(read_header(write_gguf(path / "m.gguf", values, {})))


def test_a_gguf_file_names_its_pooling(tmp_path: Path) -> None:
    assert of_file(tmp_path) is NO_DESCRIPTION
    assert of_file(tmp_path, pooling_type=0) is NO_DESCRIPTION
    assert of_file(tmp_path, pooling_type=3).pipeline == Pipeline(pooling=PoolingType.LAST)
    unknown = of_file(tmp_path, pooling_type=4).pipeline
    assert unknown == NoEmbeddings("has the pooling type 4, which is not supported")


def test_a_gguf_file_of_another_attention_is_refused(tmp_path: Path) -> None:
    (tmp_path / "causal").mkdir()
    with pytest.raises(ModelLoadError, match="its attention is not causal"):
        of_file(tmp_path, **{"attention.causal": False})

"""Reads what a model's files say about embeddings, or about reranking.

A directory says it in `modules.json` and the folders that are named there, as sentence-transformers
writes them; a GGUF file in its metadata.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx.core as mx

from batching.backend.host_array import host_array
from batching.backend.pooling.head import ACTIVATIONS, NO_HEAD, DenseLayer, PoolingHead
from batching.model_files.gguf_header import GgufHeader
from batching.pooling import NO_EMBEDDINGS, NoEmbeddings, PoolingType

MODULES: Final = "modules.json"
_MODES: Final = {
    "lasttoken": PoolingType.LAST,
    "cls": PoolingType.CLS,
    "cls_token": PoolingType.CLS,
    "mean": PoolingType.MEAN,
    "mean_tokens": PoolingType.MEAN,
}
_GGUF_MODES: Final = {1: PoolingType.MEAN, 2: PoolingType.CLS, 3: PoolingType.LAST}
# Inputs that a dense layer may name; None is a layer that names none.
_DENSE_INPUTS: Final = (None, "sentence_embedding")

Json = Mapping[str, Any]  # a file's contents: any JSON


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How a vector is made; the fields are those of `Embeddings`."""

    pooling: PoolingType
    head: PoolingHead = NO_HEAD
    is_normalized: bool = True
    max_tokens: int | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None


class Description(NamedTuple):
    """rerank_ids: the tokens that say that a document is relevant, and that it is not."""

    pipeline: Pipeline | NoEmbeddings = NO_EMBEDDINGS
    rerank_ids: tuple[int, int] | None = None


NO_DESCRIPTION: Final = Description()


def describe_file(header: GgufHeader) -> Description:
    """Return what a GGUF file says.

    Raises:
        ModelLoadError: its attention is one that this server does not compute.
    """
    architecture = header.text("general.architecture")
    if header.metadata.get(f"{architecture}.attention.causal") is False:
        raise header.refuse("its attention is not causal, and only causal models are served")
    kind = header.metadata.get(f"{architecture}.pooling_type", 0)
    if kind == 0:
        return NO_DESCRIPTION
    if not isinstance(kind, int) or kind not in _GGUF_MODES:
        return Description(NoEmbeddings(f"has the pooling type {kind}, which is not supported"))
    return Description(Pipeline(pooling=_GGUF_MODES[kind]))


def describe_directory(path: Path) -> Description:
    """Return what the files beside a model's weights say."""
    if not (path / MODULES).is_file():
        return NO_DESCRIPTION
    modules = [_Module.of(path, entry) for entry in _read(path / MODULES)]
    for module in modules:
        if module.kind == "LogitScore":
            unlike = NoEmbeddings("is a reranker, and makes no embeddings")
            return Description(unlike, _rerank_ids(module.config()))
    return Description(_pipeline(path, modules))


class _Module(NamedTuple):
    kind: str
    folder: Path

    @classmethod
    def of(cls, path: Path, entry: Json) -> "_Module":
        """Return a module; its folder must be within the model's."""
        folder = path / str(entry["path"])
        if not folder.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{MODULES} names a folder outside of the model's")
        return cls(str(entry["type"]).rpartition(".")[2], folder)

    def config(self) -> Json:
        config: Json = _read(self.folder / "config.json")
        return config


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _rerank_ids(config: Json) -> tuple[int, int] | None:
    relevant, irrelevant = config.get("true_token_id"), config.get("false_token_id")
    if isinstance(relevant, int) and isinstance(irrelevant, int):
        return relevant, irrelevant
    return None


def _pipeline(path: Path, modules: Sequence[_Module]) -> Pipeline | NoEmbeddings:
    first, *others = modules
    if first.kind != "Transformer" or not others or others[0].kind != "Pooling":
        return NoEmbeddings(f"has no pooling after its first module in {MODULES}")
    pooling = _pooling(others[0].config())
    if isinstance(pooling, NoEmbeddings):
        return pooling
    dense: list[DenseLayer] = []
    is_normalized = False
    for module in others[1:]:
        is_last = module is others[-1]
        if module.kind == "Dense" and not is_normalized:
            dense.append(_dense(module))
        elif module.kind == "Normalize" and is_last:
            is_normalized = True
        else:
            return NoEmbeddings(f"has a module {module.kind}, which is not supported there")
    settings = _optional(path / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (settings.get("prompts") or {}).items()}
    default_prompt = settings.get("default_prompt_name")
    if default_prompt is not None and default_prompt not in prompts:
        raise ValueError(f"its default prompt {default_prompt} is not among its prompts")
    length = _optional(first.folder / "sentence_bert_config.json").get("max_seq_length")
    return Pipeline(
        pooling=pooling,
        head=PoolingHead(tuple(dense)),
        is_normalized=is_normalized,
        max_tokens=None if length is None else int(length),
        prompts=prompts,
        default_prompt=default_prompt,
    )


def _optional(path: Path) -> Json:
    config: Json = _read(path) if path.is_file() else {}
    return config


def _pooling(config: Json) -> PoolingType | NoEmbeddings:
    """Return the pooling: a word, or what is true of a number of flags."""
    named = config.get("pooling_mode")
    prefix = "pooling_mode_"
    modes = [key.removeprefix(prefix) for key in config if key.startswith(prefix) and config[key]]
    if named is not None:
        modes = [named] if isinstance(named, str) else list(named)
    modes = modes or ["mean"]  # as sentence-transformers
    if len(modes) != 1 or modes[0] not in _MODES:
        return NoEmbeddings(f"has the pooling {' and '.join(modes)}, which is not supported")
    if config.get("include_prompt") is False:
        return NoEmbeddings("leaves prompts out of its pooling, which is not supported")
    return _MODES[modes[0]]


def _dense(module: _Module) -> DenseLayer:
    """Read a layer.

    Raises:
        ValueError: it is no plain layer, its activation is not known, or its weights are not there.
    """
    config = module.config()
    if config.get("use_residual") or config.get("module_input_name") not in _DENSE_INPUTS:
        raise ValueError(f"the dense layer in {module.folder.name} is no plain one")
    named = config.get("activation_function", "Tanh")  # the default of sentence-transformers
    activation = "Identity" if named is None else str(named).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ValueError(f"the activation {activation} of its dense layer is not known")
    if not (weights := module.folder / "model.safetensors").is_file():
        raise ValueError(f"the dense layer in {module.folder.name} has no model.safetensors")
    arrays: Any = mx.load(str(weights))
    host = {name: host_array(array.astype(mx.float32)) for name, array in arrays.items()}
    return DenseLayer(host["linear.weight"], host.get("linear.bias"), activation)

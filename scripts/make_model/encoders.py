"""Encoders with random weights in the shapes of known ones."""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from batching.backend.encoders.bert import Bert


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int


SHAPES: Final = {"minilm-l6": Shape(384, 6, 12), "bert-base": Shape(768, 12, 12)}
_NUM_WORDS: Final = 2000


def write_model(folder: Path, shape: Shape) -> Path:
    """Write a BERT with random weights and a tokenizer of words, as sentence-transformers does."""
    num_words = _write_tokenizer(folder)
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": num_words,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.hidden,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])
    ]
    pooling = {"word_embedding_dimension": shape.hidden, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    for name, contents in {
        "config.json": config,
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
    }.items():
        (folder / name).write_text(json.dumps(contents), encoding="utf-8")
    _write_weights(folder / "model.safetensors", config)
    return folder


def _write_tokenizer(folder: Path) -> int:
    """Write a tokenizer of words; return how many it knows."""
    ids = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words()])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=special
    )
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=512
    )
    tokenizer.save_pretrained(folder)
    return len(ids)


def _write_weights(path: Path, config: dict[str, Any]) -> None:
    """Write random weights under the names of transformers."""
    arrays: dict[str, mx.array] = {}
    model: Any = Bert(config)
    tree_flatten(model.parameters(), destination=arrays)
    for name in [name for name in arrays if ".qkv." in name]:
        parts = mx.split(arrays.pop(name), 3)
        for part, array in zip(("query", "key", "value"), parts, strict=True):
            arrays[name.replace("qkv", f"self.{part}")] = array
    mx.save_safetensors(str(path), arrays, {"format": "pt"})


def words() -> list[str]:
    """Return the words that its tokenizer knows."""
    return [f"w{i}" for i in range(_NUM_WORDS)]

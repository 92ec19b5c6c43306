"""Makes an encoder of a model's directory: the trunk, and what is done with its hidden states."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from batching.backend.encoders.bert import Bert
from batching.backend.encoders.classifiers import (
    BertClassifier,
    ModernBertClassifier,
    RobertaClassifier,
)
from batching.backend.encoders.modernbert import ModernBert
from batching.backend.encoders.ragged import Texts
from batching.backend.encoders.weights import fill, read_weights
from batching.errors import ModelLoadError

Config = Mapping[str, Any]  # config.json's contents: any JSON
PlainTrunk = Bert | ModernBert
Trunk = Callable[[Texts], mx.array]
Activation = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]

# The trunk of each type in batching/model_files/model_types.py, and its classifier.
_CLASSES: Final[Mapping[str, tuple[type[PlainTrunk], Callable[[Config], nn.Module]]]] = {
    "bert": (Bert, BertClassifier),
    "roberta": (Bert, RobertaClassifier),
    "xlm-roberta": (Bert, RobertaClassifier),
    "modernbert": (ModernBert, ModernBertClassifier),
}
_CLASSIFIES: Final = "ForSequenceClassification"
# By the last part of torch's name.
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "Identity": lambda logits: logits,
    "Sigmoid": lambda logits: 1 / (1 + np.exp(-logits)),
}


@dataclass(frozen=True)
class Encoder:
    """An encoder; of a cross-encoder `classifier` gives a logit of each text, and `activation` its score.

    plain, trunk: the trunk as it was loaded, and as it is run.
    """

    plain: PlainTrunk
    trunk: Trunk
    hidden_size: int
    vocab_size: int
    classifier: nn.Module | None = None
    activation: Activation = _ACTIVATIONS["Sigmoid"]

    @property
    def modules(self) -> list[nn.Module]:
        return [self.plain] if self.classifier is None else [self.plain, self.classifier]

    def __call__(self, texts: Texts) -> mx.array:
        """Return hidden states, `[T, hidden_size]`, or of a cross-encoder logits, `[texts, 1]`."""
        hidden = self.trunk(texts)
        if self.classifier is None:
            return hidden
        logits: mx.array = self.classifier(hidden, texts)
        return logits


def load_encoder(path: Path, config: Config, dtype: mx.Dtype | None) -> Encoder:
    """Return the encoder of a directory; its weights are not read yet.

    Raises:
        ModelLoadError: there is no such encoder, or its files do not fit together.
    """
    if config.get("is_decoder"):
        raise ModelLoadError(
            "it is_decoder by its config, and only encoders of its type are served"
        )
    make_trunk, make_classifier = _CLASSES[config["model_type"]]
    is_classifier = any(
        str(name).endswith(_CLASSIFIES) for name in config.get("architectures") or ()
    )
    arrays = read_weights(path)
    trunk = make_trunk(config)
    fill(trunk, arrays, dtype)
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    if not is_classifier:
        return Encoder(trunk, trunk, size, vocab_size)
    _check_labels(config)
    activation = _activation(config)
    classifier = make_classifier(config)
    fill(classifier, arrays, dtype)
    return Encoder(trunk, trunk, size, vocab_size, classifier, activation)


def _check_labels(config: Config) -> None:
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise ModelLoadError(
            f"it tells {count} labels apart, and only cross-encoders with one score"
        )


def _activation(config: Config) -> Activation:
    """Return what sentence-transformers does with a logit: what the config names, or a sigmoid."""
    newer = config.get("sentence_transformers")
    named = newer.get("activation_fn") if isinstance(newer, dict) else None
    named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    name = str(named).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"the activation {name} of its scores is not supported")
    return _ACTIVATIONS[name]

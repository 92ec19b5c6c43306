"""Which layers of a model adapters are made for, and how large they are."""

import re
from dataclasses import dataclass, field
from typing import Final

import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from batching.adapters.adapter import AdaptableLayer

_OF_EXPERTS: Final = "experts take no adapters"
# Modules by themselves, which get the rows that chose them (DBRX).
_EXPERT: Final = re.compile(r"(^|\.)experts\.")
_REFUSED: Final = {
    (nn.Embedding, nn.QuantizedEmbedding): "embeddings take no adapters",
    (SwitchLinear, QuantizedSwitchLinear): _OF_EXPERTS,
    (MultiLinear, QuantizedMultiLinear): "the matrices of latent heads take no adapters",
    (nn.Linear, nn.QuantizedLinear): "a product of the model's own kind takes no adapters",
}
_OUTSIDE: Final = "only what is inside of the model's layers takes adapters, and no output head"
# mlx-lm multiplies weights of these by what the model on the hub multiplies activations by.
_MULTIPLIED: Final = frozenset({"falcon_h1"})


@dataclass(frozen=True)
class Survey:
    """The linear layers that may take adapters, by their paths, and why others do not.

    takes_peft: whether their weights are as on the hub.
    """

    layers: dict[str, AdaptableLayer] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    takes_peft: bool = True


def survey(model: nn.Module) -> Survey:
    """Look at a model as it was loaded, before a platform replaces its modules."""
    takes_peft = getattr(model, "model_type", None) not in _MULTIPLIED
    found, known = Survey(takes_peft=takes_peft), set[int]()
    inside = {id(module) for layer in model.layers for module in layer.modules()}
    for path, module in sorted(model.named_modules()):
        if id(module) in known:
            continue
        known.add(id(module))
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and _EXPERT.search(path):
            found.refused[path] = _OF_EXPERTS
        elif type(module) not in (nn.Linear, nn.QuantizedLinear):
            reasons = (text for kinds, text in _REFUSED.items() if isinstance(module, kinds))
            if reason := next(reasons, None):
                found.refused[path] = reason
        elif id(module) in inside:
            found.layers[path] = _layer(module)
        else:
            found.refused[path] = _OUTSIDE
    return found


def _layer(module: nn.Module) -> AdaptableLayer:
    outputs, inputs = module.weight.shape
    if isinstance(module, nn.QuantizedLinear):
        inputs = inputs * 32 // module.bits
    return AdaptableLayer(inputs, outputs)

"""Which weights share an input: it is packed once, so all of them have it rounded further or none."""

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from batching.backend.platforms.cpu.layers.experts import Experts, SwitchLinear
from batching.backend.platforms.cpu.layers.linear import Embedding, Linear
from batching.backend.platforms.cpu.layers.per_head import HeadLinear


def of_one_input(model: nn.Module, packed: Mapping[str, Any]) -> list[list[Any]]:
    """Return the weights of a model whose modules were replaced, those together that share an input.

    packed: the weights, by the paths of modules.
    """
    inputs: dict[Any, list[Any]] = {}
    gates: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            gates[f"{path}.up_proj"] = f"{path}.gate_proj"
        if isinstance(module, Linear | Embedding):
            inputs.setdefault(id(module.product), []).append(packed[path])
        elif isinstance(module, SwitchLinear | HeadLinear):
            inputs.setdefault(gates.get(path, path), []).append(packed[path])
    return list(inputs.values())

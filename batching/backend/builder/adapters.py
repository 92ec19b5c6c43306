"""Prepares a model for adapters: finds out which of its layers take some."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.adapters.adapter import AdaptableLayer, AdaptableLayers, NoAdapters
from batching.adapters.low_rank import LowRank
from batching.backend.adapters.linears import AdaptedLinears
from batching.backend.adapters.model import ModelAdapters, ReadAdapter, adapter_bytes
from batching.backend.adapters.survey import Survey
from batching.backend.exceptions import forget_locals, one_line
from batching.backend.hooks.changes import Changes
from batching.backend.platform import PreparedModel
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.block_manager import BlockTable
from batching.config import EngineConfig
from batching.steps.step_plan import Slice

logger = logging.getLogger(__name__)

_SLOT: Final = 1
_NOT_USED: Final = "is computed together with others on this platform"


@dataclass(frozen=True)
class OpenAdapters:
    """A model that takes adapters.

    num_bytes: of all slots.
    """

    model: ModelAdapters
    num_bytes: int


def open_adapters(
    config: EngineConfig,
    found: Survey,
    prepared: PreparedModel,
    checked: CheckedModel,
    changes: Changes,
    read: ReadAdapter,
) -> OpenAdapters | NoAdapters:
    """Prepare a model for adapters, in the mode in which it is served; say why, if it takes none."""
    own = Changes()
    try:
        kinds = _kinds(config, found, prepared, checked, own)
        layers = _tried(config, found, prepared, checked, kinds)
    except Exception as error:
        # The code of a model can raise anything.
        own.undo()
        forget_locals(error)
        reason = f"takes no adapters: {one_line(error)}"
        logger.warning("%s %s", config.model_id, reason)
        return NoAdapters(reason)
    changes.take(own)
    adapters = ModelAdapters(kinds, layers, read)
    return OpenAdapters(adapters, config.max_adapters * adapter_bytes(layers))


def _kinds(
    config: EngineConfig,
    found: Survey,
    prepared: PreparedModel,
    checked: CheckedModel,
    changes: Changes,
) -> list[AdaptedLinears]:
    packed = prepared.packed_linears(found.layers.keys())
    modules: Mapping[str, nn.Module] = {
        path: module
        for path, module in prepared.loaded.model.named_modules()
        if path in found.layers and isinstance(module, nn.Linear | nn.QuantizedLinear)
    }
    of_mlx = checked.platform.linear_modules(modules, config.max_adapters, changes)
    return [of_mlx] if packed is None else [of_mlx, packed]


def _tried(
    config: EngineConfig,
    found: Survey,
    prepared: PreparedModel,
    checked: CheckedModel,
    kinds: list[AdaptedLinears],
) -> AdaptableLayers:
    """Return the layers that add adapters of zeros to a prompt, and to decodes."""
    model = ModelAdapters(kinds, AdaptableLayers({}, {}, 1), lambda _, __: {})
    for kind in kinds:
        kind.put(_SLOT, {path: _zeros(found.layers[path]) for path in kind.paths})
    num_window_blocks = 0 if checked.layout.window is None else 2
    cache = checked.cache(2, config.block_size, num_window_blocks=num_window_blocks)
    loaded = prepared.loaded
    runner = MLXRunner(loaded.model, loaded.vocab_size, checked.selection, cache)
    used = set(found.layers)
    for slices in ([_slice(0, 0, 2)], [_slice(0, 2, 1), _slice(1, 0, 1)]):
        step = cache.begin(slices)
        with model.running(step.attention.slices):
            logits = runner.logits(step)
        cache.flush()
        mx.eval(logits, cache.arrays)
        used &= {path for kind in kinds for path in kind.take_used(_SLOT)}
    model.reset()
    return AdaptableLayers(
        {path: layer for path, layer in found.layers.items() if path in used},
        found.refused | {path: _NOT_USED for path in found.layers if path not in used},
        config.max_adapter_rank,
    )


def _slice(sequence_id: int, start: int, num_tokens: int) -> Slice:
    blocks = BlockTable([sequence_id]).value
    return Slice(
        sequence_id,
        start,
        (0,) * num_tokens,
        blocks,
        blocks,
        state_slot=sequence_id,
        adapter_slot=_SLOT,
        num_samples=1,
        is_prefill=start == 0,
    )


def _zeros(layer: AdaptableLayer) -> LowRank:
    inputs, outputs, _ = layer
    return LowRank(np.zeros((inputs, 1), np.float32), np.zeros((1, outputs), np.float32))

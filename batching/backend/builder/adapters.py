"""Prepares a model for adapters: finds out which of its layers take some."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.adapters.adapter import NO_SLOT, AdaptableLayer, AdaptableLayers, NoAdapters
from batching.adapters.low_rank import LowRank
from batching.backend.adapters.linears import AdaptedLinears
from batching.backend.adapters.model import (
    ModelAdapters,
    ReadAdapter,
    largest_adapter,
    read_adapter,
)
from batching.backend.adapters.survey import Survey
from batching.backend.exceptions import forget_locals, one_line
from batching.backend.hooks.changes import Changes
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.block_manager import BlockIds, BlockTable
from batching.config import EngineConfig
from batching.steps.step_plan import Slice

logger = logging.getLogger(__name__)

_SLOT: Final = 1
# Those of a prompt, and one more.
_NUM_TOKENS: Final = 6
_NOT_USED: Final = "this platform computes it together with others"


class AdaptedModel(NamedTuple):
    """A model that is ready to be served.

    found: its layers before a platform replaced its modules.
    packed: what adds adapters to those that are no modules of MLX any more; None if all are.
    """

    model: nn.Module
    vocab_size: int
    found: Survey
    packed: AdaptedLinears | None = None


@dataclass(frozen=True)
class OpenAdapters:
    """A model that takes adapters.

    num_bytes: of all slots.
    """

    model: ModelAdapters
    num_bytes: int


def open_adapters(
    config: EngineConfig,
    adapted: AdaptedModel,
    checked: CheckedModel,
    changes: Changes,
    read: ReadAdapter = read_adapter,
) -> OpenAdapters | NoAdapters:
    """Prepare a model for adapters, in the mode in which it is served; say why, if it takes none."""
    own = Changes()
    try:
        kinds = _kinds(config, adapted, checked, own)
        layers = _tried(config, adapted, checked, kinds)
    except Exception as error:
        # The code of a model can raise anything.
        own.undo()
        forget_locals(error)
        reason = f"takes no adapters: {one_line(error)}"
        logger.warning("%s %s", config.model_id, reason)
        return NoAdapters(reason)
    changes.take(own)
    adapters = ModelAdapters(kinds, layers, read)
    return OpenAdapters(adapters, config.max_adapters * largest_adapter(layers))


def _kinds(
    config: EngineConfig, adapted: AdaptedModel, checked: CheckedModel, changes: Changes
) -> list[AdaptedLinears]:
    modules: Mapping[str, nn.Module] = {
        path: module
        for path, module in adapted.model.named_modules()
        if path in adapted.found.layers and isinstance(module, nn.Linear | nn.QuantizedLinear)
    }
    of_mlx = checked.platform.linear_modules(modules, config.max_adapters, changes)
    return [of_mlx] if adapted.packed is None else [of_mlx, adapted.packed]


def _tried(
    config: EngineConfig,
    adapted: AdaptedModel,
    checked: CheckedModel,
    kinds: Sequence[AdaptedLinears],
) -> AdaptableLayers:
    """Return the layers that add adapters of zeros to prompts, and to decodes of which not all have one."""
    found = adapted.found
    adapters = ModelAdapters(kinds, AdaptableLayers(found.layers, {}, 1))
    num_blocks = -(-_NUM_TOKENS // config.block_size) + 1
    num_window_blocks = 0 if checked.layout.window is None else num_blocks
    cache = checked.cache(num_blocks, config.block_size, num_window_blocks=num_window_blocks)
    runner = MLXRunner(adapted.model, adapted.vocab_size, checked.selection, cache)
    used = set(found.layers)
    blocks = BlockTable(range(num_blocks - 1)).value, BlockTable([num_blocks - 1]).value
    # Unlike ones: modules that get the rows which chose them would hardly get as many.
    tokens = [index % adapted.vocab_size for index in range(_NUM_TOKENS)]
    last = _NUM_TOKENS - 1
    prompts = [_slice(0, 0, tokens[:last], blocks[0]), _slice(1, 0, tokens[:1], blocks[1])]
    decodes = [
        _slice(0, last, tokens[last:], blocks[0]),
        _slice(1, 1, tokens[1:2], blocks[1], NO_SLOT),
    ]
    for slices in (prompts, decodes):
        for kind in kinds:
            kind.put(_SLOT, {path: _zeros(found.layers[path]) for path in kind.paths})
        step = cache.begin(slices)
        with adapters.running(step.attention.slices):
            logits = runner.logits(step)
        cache.flush()
        mx.eval(logits, cache.arrays)
        used &= {path for kind in kinds for path in kind.used(_SLOT)}
    adapters.reset()
    ranks = [kind.max_rank for kind in kinds if kind.max_rank is not None]
    return AdaptableLayers(
        {path: layer for path, layer in found.layers.items() if path in used},
        found.refused | {path: _NOT_USED for path in found.layers if path not in used},
        min([config.max_adapter_rank, *ranks]),
        found.takes_peft,
    )


def _slice(
    sequence_id: int,
    start: int,
    tokens: Sequence[int],
    blocks: BlockIds,
    adapter_slot: int = _SLOT,
) -> Slice:
    return Slice(
        sequence_id,
        start,
        tuple(tokens),
        blocks,
        blocks,
        state_slot=sequence_id,
        adapter_slot=adapter_slot,
        num_samples=1,
        is_prefill=start == 0,
    )


def _zeros(layer: AdaptableLayer) -> LowRank:
    inputs, outputs = layer
    return LowRank(np.zeros((inputs, 1), np.float32), np.zeros((1, outputs), np.float32))

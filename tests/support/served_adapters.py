"""Adapters for a model that says their names."""

import json
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from batching.adapters.adapter import AdaptableLayer, AdaptableLayers
from batching.adapters.files.adapter_file import AdapterFile
from batching.steps.sequences import SequenceState
from tests.support.speaker import END, Speaker

LAYER: Final = "model.layers.0.self_attn.q_proj"
INPUTS: Final = 8
OUTPUTS: Final = 12
LAYERS: Final = AdaptableLayers({LAYER: AdaptableLayer(INPUTS, OUTPUTS)}, {}, max_rank=4)


class SayingAdapters(Speaker):
    """Says the name of the request's adapter, or what it says otherwise."""

    def _choose(self, sequence: SequenceState, prefix: list[int]) -> int:
        if sequence.spec.adapter is None:
            return super()._choose(sequence, prefix)
        position = len(prefix) - sequence.num_prompt_tokens
        name = sequence.spec.adapter.name.encode()
        return name[position] if position < len(name) else END


def write_adapter(
    folder: Path, seed: int = 0, *, layer: str = LAYER, rank: int = 2, inputs: int = INPUTS
) -> Path:
    """Write an adapter of mlx-lm; its contents follow from the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    shapes = {f"{layer}.lora_a": (inputs, rank), f"{layer}.lora_b": (rank, OUTPUTS)}
    tensors = {
        name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "adapters.safetensors")
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": 20.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def open_adapter(folder: Path, name: str, seed: int = 0) -> AdapterFile:
    return AdapterFile(write_adapter(folder / name, seed), name)

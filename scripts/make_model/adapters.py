"""LoRA adapters of random numbers."""

import json
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from batching.adapters.adapter import AdaptableLayers

_SCALE: Final = 20.0
_LAYER: Final = re.compile(r"layers\.(\d+)\.")

Matrices = dict[str, tuple[Any, Any]]


def random_matrices(
    layers: AdaptableLayers, rank: int, seed: int, *, num_last: int = 0, size: float = 1e-3
) -> Matrices:
    """Return A `[inputs, rank]` and B `[rank, outputs]` for all layers, or for the last ones of a model.

    size: of the numbers in B.
    """
    rng = np.random.default_rng(seed)
    first = 1 + max(map(_index, layers.layers)) - num_last if num_last else 0
    return {
        path: (
            (rng.standard_normal((inputs, rank)) * inputs**-0.5).astype(np.float32),
            (rng.standard_normal((rank, outputs)) * size).astype(np.float32),
        )
        for path, (inputs, outputs) in layers.layers.items()
        if _index(path) >= first
    }


def write_adapter(folder: Path, matrices: Matrices) -> Path:
    """Write an adapter as mlx-lm does, with its scale of 20."""
    tensors: dict[str, Any] = {}
    for path, (a, b) in matrices.items():
        tensors |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
    folder.mkdir()
    save_file(tensors, folder / "adapters.safetensors")
    rank = next(iter(matrices.values()))[0].shape[1]
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": _SCALE}}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def added(matrices: Matrices) -> dict[str, Any]:
    """Return what is added to the weights `[outputs, inputs]` of layers, by their paths."""
    return {path: _SCALE * (a @ b).T for path, (a, b) in matrices.items()}


def _index(path: str) -> int:
    found = _LAYER.search(path)
    return int(found[1]) if found else 0

"""Writes files of adapters as mlx-lm and PEFT do, and files that neither would write."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Layers = Mapping[str, tuple[Array, Array]]

Q_PROJ = "model.layers.0.self_attn.q_proj"
V_PROJ = "model.layers.1.self_attn.v_proj"


def random_layers(seed: int = 1, rank: int = 2) -> dict[str, tuple[Array, Array]]:
    """Return A `[6, rank]` and B `[rank, 8]`, and of another layer A `[6, rank]` and B `[rank, 4]`."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        # BF16 and F16 have these, too.
        return rng.integers(-64, 64, (rows, columns)).astype(np.float32) / np.float32(32)

    return {
        path: (matrix(6, rank), matrix(rank, outputs))
        for path, outputs in ((Q_PROJ, 8), (V_PROJ, 4))
    }


def encoded(array: Array, dtype: str) -> bytes:
    match dtype:
        case "F32":
            return array.astype("<f4").tobytes()
        case "F16":
            return array.astype("<f2").tobytes()
        case _:
            return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def safetensors(tensors: Mapping[str, Array], dtype: str = "F32") -> bytes:
    """Return a file, in which tensors are in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        content = encoded(array, dtype)
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        data += content
    return with_header(header, data)


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def mlx_lm_tensors(layers: Layers) -> dict[str, Array]:
    return {
        f"{path}.lora_{part}": matrix
        for path, matrices in layers.items()
        for part, matrix in zip("ab", matrices, strict=True)
    }


def peft_tensors(layers: Layers, adapter: str = "") -> dict[str, Array]:
    return {
        f"base_model.model.{path}.lora_{part}{adapter}.weight": np.ascontiguousarray(matrix.T)
        for path, matrices in layers.items()
        for part, matrix in zip("AB", matrices, strict=True)
    }


def write_mlx_lm(
    folder: Path, tensors: Mapping[str, Array], *, dtype: str = "F32", **config: Any
) -> Path:
    """Write an adapter of mlx-lm; `config` changes its config."""
    parameters = {"rank": 2, "scale": 20.0, "dropout": 0.0}
    described = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters} | config
    return _write(folder, "adapters.safetensors", safetensors(tensors, dtype), described)


def write_peft(
    folder: Path, tensors: Mapping[str, Array], *, dtype: str = "F32", **config: Any
) -> Path:
    """Write an adapter of PEFT 0.15; `config` changes its config."""
    described = PEFT_CONFIG | config
    return _write(folder, "adapter_model.safetensors", safetensors(tensors, dtype), described)


PEFT_CONFIG: dict[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "example/base",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 6,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 2,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}


def _write(folder: Path, weights: str, content: bytes, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / weights).write_bytes(content)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder

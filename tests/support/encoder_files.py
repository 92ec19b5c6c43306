"""Directories of encoders and cross-encoders, as other libraries write them."""

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from tests.support.reference_weights import weight

GOLDEN: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "golden_encoders.json").read_text(encoding="utf-8")
)


def write_encoder(directory: Path, kind: str, **changes: Any) -> Path:
    """Write an embedding model; `changes` are of its config."""
    golden = GOLDEN[kind]["embedder"]
    _write(directory, golden["files"], golden["shapes"], changes)
    return directory


def write_cross_encoder(directory: Path, kind: str, **changes: Any) -> Path:
    """Write a cross-encoder; `changes` are of its config."""
    golden, files = GOLDEN[kind]["cross_encoder"], GOLDEN[kind]["embedder"]["files"]
    kept = {name: text for name, text in files.items() if name.startswith("tokenizer")}
    _write(directory, kept | {"config.json": golden["config"]}, golden["shapes"], changes)
    return directory


def _write(
    directory: Path, files: dict[str, str], shapes: dict[str, list[int]], changes: dict[str, Any]
) -> None:
    config = json.loads(files["config.json"]) | changes
    for path, text in (files | {"config.json": json.dumps(config)}).items():
        (directory / path).parent.mkdir(exist_ok=True, parents=True)
        (directory / path).write_text(text, encoding="utf-8")
    arrays = {name: mx.array(weight(name, tuple(shape))) for name, shape in shapes.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, {"format": "pt"})

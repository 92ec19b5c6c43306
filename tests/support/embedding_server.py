"""Directories of embedding models and of a reranker, and the app over one of them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import mlx.core as mx

from app.main import create_app
from app.settings import Settings
from app.settings.configs import engine_config
from batching import SchedulerManager
from tests.support.embedding_models import RERANKER, config_of
from tests.support.reference_weights import weight

GOLDEN: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "golden_embeddings.json").read_text(encoding="utf-8")
)


def write_embedder(directory: Path, name: str) -> Path:
    """Write a model's directory as sentence-transformers does."""
    golden = GOLDEN[name]
    for path, text in golden["files"].items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_text(text, encoding="utf-8")
    _write_weights(directory, golden["shapes"])
    for index, shapes in golden["dense"].items():
        _write_weights(directory / f"{index}_Dense", shapes)
    return directory


def write_reranker(directory: Path) -> Path:
    """Write a model's directory as transformers does."""
    config = config_of(RERANKER) | {"model_type": RERANKER}
    files = GOLDEN["last"]["files"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text(files[name], encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_weights(directory, GOLDEN["reranker"]["shapes"])
    return directory


def _write_weights(directory: Path, shapes: dict[str, list[int]]) -> None:
    arrays = {name: mx.array(weight(name, tuple(shape))) for name, shape in shapes.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, {"format": "pt"})


@asynccontextmanager
async def serving(directory: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a directory's model in float32, without a network."""
    chosen = Settings(
        model=str(directory),
        model_id="tiny",
        device="cpu",
        cpu_precision="exact",
        num_blocks=64,
        **settings,
    )
    manager = SchedulerManager([engine_config(chosen)])
    transport = httpx.ASGITransport(create_app(manager, chosen))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client
    finally:
        manager.close()

"""Describes the models: what they can do, and where each is between the disk and the device."""

from dataclasses import asdict
from datetime import UTC, datetime
from time import time

from app.api.models.schemas import Batching, Memory, Modalities, ModelCard, Status
from app.parsing.formats.model_format import message_format
from app.parsing.reasoning.reasoning_markers import reasoning_markers
from app.prompts.fill_in import fill_in_tokens
from app.server_state import ServerState
from batching import (
    Embeddings,
    ModelInfo,
    ModelState,
    ModelStatus,
    NoVision,
    ServedAdapter,
    VisionModel,
    vision_on_disk,
)


def card(service: ServerState, status: ModelStatus, *, is_admin: bool) -> ModelCard:
    """Describe a model; `is_admin` shows why its load failed.

    It may render the chat template of a model that was just loaded, which takes a moment.
    """
    model_id = status.model_id
    engine = service.manager.loaded(model_id)
    info = None if engine is None else engine.model
    vision = vision_on_disk(status.model.config) if info is None else info.vision
    store = None if engine is None else engine.latest_stats.store
    use, expires = status.use, status.expires_in
    return ModelCard(
        id=model_id,
        created=service.started,
        root=model_id,
        max_model_len=None if info is None else info.max_model_len,
        display_name=model_id,
        created_at=datetime.fromtimestamp(service.started, UTC),
        aliases=list(status.model.aliases),
        status=status_object(status, is_admin=is_admin),
        capabilities=None if info is None else info.derived(capabilities),
        architecture=None if vision is None else modalities(vision),
        max_images=service.settings.max_images if isinstance(vision, VisionModel) else None,
        batching=None if info is None else Batching(mode=info.mode, reason=info.mode_reason),
        memory=None if use is None else Memory(**asdict(use)),
        kv_store_bytes=None if store is None else store.num_bytes,
        in_flight=status.num_requests + status.num_waiting,
        pinned=status.model.is_pinned,
        expires_at=None if expires is None else int(time() + expires),
    )


def adapter_card(base: ModelCard, adapter: ServedAdapter, *, is_admin: bool) -> ModelCard:
    """Describe an adapter: what it has not by itself is its base's."""
    return base.model_copy(
        update={
            "id": adapter.name,
            "root": adapter.source if is_admin else adapter.name,
            "parent": base.id,
            "display_name": adapter.name,
            "aliases": [f"{base.id}:{adapter.name}"],
            "memory": None,
            "kv_store_bytes": None,
        }
    )


def status_object(status: ModelStatus, *, is_admin: bool) -> Status:
    """Return the state of a model as llama.cpp's router writes it."""
    if status.state is ModelState.FAILED:
        return Status(value="unloaded", failed=True, reason=status.reason if is_admin else None)
    progress = round(status.progress, 3) if status.state is ModelState.LOADING else None
    return Status(value=status.state.value, progress=progress)


def capabilities(model: ModelInfo) -> list[str]:
    """Return what requests can ask of a model, in Ollama's words."""
    found = _of_text(model) if model.generates else []
    if isinstance(model.embeddings, Embeddings):
        found.append("embedding")
    if model.reranker is not None:
        found.append("rerank")
    return found


def _of_text(model: ModelInfo) -> list[str]:
    found = ["completion"]
    if model.tokenizer.has_chat_template and message_format(model).is_native:
        found.append("tools")
    if fill_in_tokens(model) is not None:
        found.append("insert")
    if reasoning_markers(model) is not None:
        found.append("thinking")
    if isinstance(model.vision, VisionModel):
        found.append("vision")
    return found


def modalities(vision: VisionModel | NoVision) -> Modalities:
    """Return what a model reads and writes."""
    takes_images = isinstance(vision, VisionModel)
    return Modalities(input_modalities=["text", "image"] if takes_images else ["text"])

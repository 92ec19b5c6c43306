"""`/v1/models` and `/models/…`: the models that requests can name."""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field

from app.api.schemas.base import RequestModel

StateName = Literal["unloaded", "loading", "loaded", "draining"]


class Status(BaseModel):
    """Llama.cpp's object, in which a model that failed to load is an unloaded one.

    progress: the share of the load that is done; only while it is loading.
    reason: why the last load failed; only for admins.
    """

    value: StateName
    progress: float | None = None
    failed: bool | None = None
    reason: str | None = None


class Batching(BaseModel):
    """Whether all requests of a step run at once.

    mode: see docs/model-types.md; `ragged` is the whole model.
    reason: why not, if not.
    """

    mode: str
    reason: str


class Modalities(BaseModel):
    """What a model reads and writes, in the words of llama.cpp and OpenRouter."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]] = ["text"]


class Memory(BaseModel):
    """Bytes."""

    weights: int
    kv_cache: int
    states: int
    adapters: int = 0


class ModelCard(BaseModel):
    """OpenAI's fields, two of vLLM's, Anthropic's, and those of this server.

    `root` is what was loaded.  What is known only of a loaded model is null otherwise.  What an adapter has not by
    itself is its base's.

    root: of an adapter, for admins, its folder or hub id.
    parent: the model to which an adapter is added; null if it is none.
    architecture: of a model that is not loaded, what its files say, if they are on this machine.
    max_images: of one request; null if it takes none.
    capabilities: `completion`, `tools`, `thinking`, `vision`, `embedding`, `rerank`, as Ollama names them.
    kv_store_bytes: what is kept of it in the folder of the KV cache; null without one.
    in_flight: requests that use the model or wait for it.
    expires_at: when it is unloaded if no request comes, in seconds since the epoch; null is never.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlx-batch-server"
    root: str
    parent: str | None = None
    max_model_len: int | None
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    aliases: list[str]
    status: Status
    capabilities: list[str] | None
    architecture: Modalities | None
    max_images: int | None
    batching: Batching | None
    memory: Memory | None
    kv_store_bytes: int | None
    in_flight: int
    pinned: bool
    expires_at: int | None


class ModelList(BaseModel):
    """All models on one page."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class AnthropicModel(BaseModel):
    """Anthropic's fields alone, some of which other APIs have with other types.

    max_tokens: of a prompt and its completion together; null if it is not loaded.
    """

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    line: None = None
    deprecated_at: None = None
    retires_at: None = None
    capabilities: None = None
    max_input_tokens: int | None
    max_tokens: int | None

    @classmethod
    def of(cls, card: ModelCard) -> Self:
        return cls(
            id=card.id,
            display_name=card.display_name,
            created_at=card.created_at,
            max_input_tokens=card.max_model_len,
            max_tokens=card.max_model_len,
        )


class AnthropicModelList(BaseModel):
    """All models on one page."""

    data: list[AnthropicModel]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class ModelName(RequestModel):
    """The body of `/models/load` and `/models/unload`."""

    model: Annotated[str, Field(description="Id or alias of a model that the server lists.")]


class Accepted(BaseModel):
    """What was asked for goes on; the state of the model tells how."""

    success: Literal[True] = True

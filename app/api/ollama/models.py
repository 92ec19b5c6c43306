"""`GET /api/tags`, `/api/ps` and `/api/version`, and `POST /api/show`."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, Final

from fastapi import Request, Response
from pydantic import BaseModel, Field

from app.api.models.cards import capabilities
from app.api.ollama.names import known_name
from app.api.ollama.route import new_router
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import Text
from app.api.serving import prepared
from app.server_state import ServerState, server_state
from batching import (
    ModelDescription,
    ModelInfo,
    ModelLoadError,
    ModelStatus,
    ServedAdapter,
    describe,
    local_path,
)

router = new_router()

# Clients compare it to learn what they may send; of Ollama's that has what is here.
OLLAMA_VERSION: Final = "0.12.6"
_NOTHING: Final = ModelDescription(None, {}, (), 0)
_NEVER: Final = datetime(9999, 1, 1, tzinfo=UTC)
# Values that a 32-bit word of packed weights has, by its type.
_WORD_BITS: Final = 32


class Details(BaseModel):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(BaseModel):
    """`digest` is of the name: contents are not hashed, but for adapters."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: Details


class Loaded(Listed):
    """`expires_at` is in the year 9999 for a model that stays."""

    size_vram: int
    expires_at: datetime
    context_length: int


class Tags(BaseModel):
    models: list[Listed]


class Processes(BaseModel):
    models: list[Loaded]


class Version(BaseModel):
    version: str


class ShowRequest(RequestModel):
    model: Text = Field(default="", description="Or `name`.")
    name: Text = ""


class Shown(BaseModel):
    modelfile: str = ""
    parameters: str = ""
    template: str
    license: str = ""
    modified_at: datetime
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]


@router.get("/api/version")
async def version() -> Version:
    """Return the version of Ollama whose API this is, for clients that compare it."""
    return Version(version=OLLAMA_VERSION)


@router.get("/api/tags", response_model=Tags)
async def tags(request: Request) -> Response:
    """List the models that can be named, adapters after their base."""
    manager = server_state(request).manager
    found = [
        (s, each) for s in manager.statuses() for each in (None, *manager.adapters.of(s.model_id))
    ]

    def write() -> str:
        return Tags(models=[Listed(**_listed(*each)) for each in found]).model_dump_json()

    return Response(await prepared(request, write), media_type="application/json")


@router.get("/api/ps")
async def processes(request: Request) -> Processes:
    """List the models that are loaded."""
    state = server_state(request)
    return await prepared(request, partial(_processes, state))


@router.post("/api/show")
async def show(body: ShowRequest, request: Request) -> Shown:
    """Describe a model; nothing is loaded for it.

    Raises:
        ModelNotFound: there is no such model.
    """
    state = server_state(request)
    name = known_name(state.manager, body.model or body.name)
    adapter, model_id = state.manager.adapter(name), state.manager.resolve(name)
    status = next(s for s in state.manager.statuses() if s.model_id == model_id)
    engine = state.manager.loaded(model_id)
    return await prepared(
        request, partial(_shown, status, adapter, None if engine is None else engine.model)
    )


def _processes(state: ServerState) -> Processes:
    found = []
    for status in state.manager.statuses():
        engine = state.manager.loaded(status.model_id)
        if engine is None or status.use is None:
            continue
        expires = status.expires_in
        used = status.use.total
        fields = _listed(status) | {"size": used, "size_vram": used}
        found.append(
            Loaded(
                **fields,
                expires_at=_NEVER
                if expires is None
                else datetime.now(UTC) + timedelta(seconds=expires),
                context_length=engine.model.max_model_len,
            )
        )
    return Processes(models=found)


def _listed(status: ModelStatus, adapter: ServedAdapter | None = None) -> dict[str, Any]:
    described, modified = _described(status)
    name = status.model_id if adapter is None else adapter.name
    return {
        "name": name,
        "model": name,
        "modified_at": modified,
        "size": described.size,
        "digest": sha256(name.encode()).hexdigest() if adapter is None else adapter.adapter.digest,
        "details": _details(described, adapter),
    }


def _shown(status: ModelStatus, adapter: ServedAdapter | None, info: ModelInfo | None) -> Shown:
    described, modified = _described(status)
    details = _details(described, adapter)
    context = described.context if info is None else info.max_model_len
    known: Mapping[str, Any] = {
        "general.architecture": details.family,
        "general.parameter_count": _num_parameters(described),
        f"{details.family}.context_length": context,
        f"{details.family}.block_count": described.num_layers,
        f"{details.family}.embedding_length": described.config.get("hidden_size"),
    }
    return Shown(
        template=described.chat_template or "",
        modified_at=modified,
        details=details,
        model_info={name: value for name, value in known.items() if value is not None},
        capabilities=_expected(described) if info is None else [*info.derived(capabilities)],
    )


def _expected(described: ModelDescription) -> list[str]:
    """Return what a model can do by its files: what it thinks and embeds is known once it is loaded."""
    found = ["completion"]
    if described.has_tools:
        found.append("tools")
    return found


def _described(status: ModelStatus) -> tuple[ModelDescription, datetime]:
    """Return what the files of a model say, as far as they are here and can be read, and their time."""
    try:
        path = local_path(status.model.config.model)
        if path is None:
            return _NOTHING, datetime.fromtimestamp(0, UTC)
        time = path.stat().st_mtime
        return _read(path, time), datetime.fromtimestamp(time, UTC)
    except (OSError, ModelLoadError):
        return _NOTHING, datetime.fromtimestamp(0, UTC)


@lru_cache(maxsize=256)
def _read(path: Path, _time: float) -> ModelDescription:
    return describe(path)


def _details(described: ModelDescription, adapter: ServedAdapter | None) -> Details:
    family = described.text_type or described.model_type or "unknown"
    return Details(
        parent_model="" if adapter is None else adapter.base,
        format="gguf" if described.is_gguf else "safetensors",
        family=family,
        families=[family],
        parameter_size=_short(_num_parameters(described)),
        quantization_level=described.quantization or "unknown",
    )


def _num_parameters(described: ModelDescription) -> int:
    """Count the values of all tensors, those in packed words as well."""
    declared = described.config.get("quantization")
    bits = declared.get("bits") if isinstance(declared, dict) else None
    packed = _WORD_BITS // bits if isinstance(bits, int) and 0 < bits <= _WORD_BITS else 1
    return sum(
        prod(each.shape) * (packed if each.type_name == "U32" else 1) for each in described.tensors
    )


def _short(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"

"""`GET /v1/models` and `GET /v1/models/{id}`, as OpenAI and Anthropic have them."""

from datetime import UTC, datetime

from fastapi import APIRouter, Request

from app.api.openai.schemas.models import ModelCard, ModelList
from app.server_state import ServerState, server_state
from batching import ModelNotFound

router = APIRouter()


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """List what can be named in `model`, the default first."""
    cards = _cards(request)
    return ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)


# Hub ids have a slash.
@router.head("/v1/models/{model_id:path}", include_in_schema=False)
@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, request: Request) -> ModelCard:
    """Describe one model."""
    for card in _cards(request):
        if card.id == model_id:
            return card
    raise ModelNotFound(model_id)


def _cards(request: Request) -> list[ModelCard]:
    service = server_state(request)
    return [_card(service, model_id) for model_id in service.manager.model_ids]


def _card(service: ServerState, model_id: str) -> ModelCard:
    # A model is loaded at its first request, so only the start of the server is known.
    engine = service.manager.loaded(model_id)
    return ModelCard(
        id=model_id,
        created=service.started,
        root=model_id,
        max_model_len=None if engine is None else engine.model.max_model_len,
        display_name=model_id,
        created_at=datetime.fromtimestamp(service.started, UTC),
    )

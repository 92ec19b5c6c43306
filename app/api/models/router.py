"""`GET /v1/models` and `GET /v1/models/{id}`, as OpenAI and Anthropic have them, with llama.cpp's `status`."""

from functools import partial

from fastapi import APIRouter, Request

from app.api.models.cards import card
from app.api.models.schemas import ModelCard, ModelList
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import client_of, prepared
from app.server_state import server_state

router = APIRouter(responses=ERROR_RESPONSES)


# llama.cpp's path.
@router.get("/models", include_in_schema=False)
@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """List what can be named in `model`, the default first; nothing is loaded for it."""
    cards = await _cards(request)
    return ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)


# Hub ids have a slash.
@router.head("/v1/models/{model_id:path}", include_in_schema=False)
@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, request: Request) -> ModelCard:
    """Describe one model, by its id or an alias."""
    found = server_state(request).manager.resolve(model_id)
    return next(each for each in await _cards(request) if each.id == found)


async def _cards(request: Request) -> list[ModelCard]:
    service, is_admin = server_state(request), client_of(request).is_admin
    statuses = service.manager.statuses()
    describe = partial(card, service, is_admin=is_admin)
    return await prepared(request, lambda: [describe(status) for status in statuses])

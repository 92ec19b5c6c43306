"""`GET /v1/models` and `GET /v1/models/{id}`, as OpenAI and Anthropic have them, with llama.cpp's `status`."""

from collections.abc import Callable, Iterator

from fastapi import APIRouter, Request, Response

from app.api.models.cards import adapter_card, card
from app.api.models.schemas import AnthropicModel, AnthropicModelList, ModelCard, ModelList
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import client_of, prepared
from app.http.errors.formats import is_anthropic
from app.server_state import server_state

router = APIRouter(responses=ERROR_RESPONSES)


# llama.cpp's path.
@router.get("/models", include_in_schema=False)
@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", response_model=AnthropicModelList | ModelList)
async def list_models(request: Request) -> Response:
    """List what can be named in `model`, the default first, adapters after their base; nothing is loaded for it.

    With the header `anthropic-version`, models are Anthropic's objects.
    """
    cards = _cards(request)

    def write() -> str:
        models = [*cards()]
        ends = {"first_id": models[0].id, "last_id": models[-1].id}
        if is_anthropic(request.scope):
            data = list(map(AnthropicModel.of, models))
            return AnthropicModelList(data=data, **ends).model_dump_json()
        return ModelList(data=models, **ends).model_dump_json()

    # A thousand adapters take too long for the event loop.
    return Response(await prepared(request, write), media_type="application/json")


# Hub ids have a slash.
@router.head("/v1/models/{model_id:path}", include_in_schema=False)
@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, request: Request) -> AnthropicModel | ModelCard:
    """Describe one model, by its id or an alias, or an adapter."""
    manager = server_state(request).manager
    adapter = manager.adapter(model_id)
    found = manager.resolve(model_id) if adapter is None else adapter.name
    cards = _cards(request)
    card = await prepared(request, lambda: next(each for each in cards() if each.id == found))
    return AnthropicModel.of(card) if is_anthropic(request.scope) else card


def _cards(request: Request) -> Callable[[], Iterator[ModelCard]]:
    """Return what describes the models that there are now; blocking."""
    service, is_admin = server_state(request), client_of(request).is_admin
    manager = service.manager
    statuses = [(status, manager.adapters.of(status.model_id)) for status in manager.statuses()]

    def describe() -> Iterator[ModelCard]:
        for status, adapters in statuses:
            base = card(service, status, is_admin=is_admin)
            yield base
            yield from (adapter_card(base, each, is_admin=is_admin) for each in adapters)

    return describe

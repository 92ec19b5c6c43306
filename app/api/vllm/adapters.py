"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field

from app.api.schemas.base import RequestModel
from app.api.schemas.errors import ERROR_RESPONSES, TEXT_RESPONSES
from app.api.schemas.fields import Text
from app.api.serving import check_admin, client_of, engine_for
from app.http.errors.rejections import Forbidden
from app.http.json_body import JsonRoute
from app.server_state import ServerState, server_state
from app.settings import env_name
from batching import (
    AdapterError,
    AdapterFile,
    InvalidRequest,
    ModelNotFound,
    resolve_adapter,
)

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


class LoadRequest(RequestModel):
    lora_name: Annotated[Text, Field(description="What requests call it, in `model`.")]
    lora_path: Annotated[
        Text, Field(description="Its folder, in one of those that the operator allows.")
    ]
    load_inplace: bool = Field(
        default=False, description="Take the place of an adapter with this name."
    )
    base_model_name: Text | None = Field(
        default=None, description="The model to which it is added; the default one if left out."
    )


class UnloadRequest(RequestModel):
    lora_name: Text


@router.post("/v1/load_lora_adapter", response_class=Response, responses=TEXT_RESPONSES)
async def load_adapter(body: LoadRequest, request: Request) -> Response:
    """Serve an adapter from now on; its model is loaded for it, to see whether it fits.

    Raises:
        Forbidden: the key is not one of an admin, or the operator does not allow it.
        ModelNotFound: there is no such base.
        InvalidRequest: the adapter cannot be read or does not fit, or its name is not free.
    """
    state = _allowed(request)
    manager = state.manager
    base = manager.resolve(body.base_model_name or manager.model_ids[0])
    with _field("lora_name"):
        manager.adapters.check_name(body.lora_name)
    opened = partial(_opened, body, state.settings.adapter_folders)
    file = await state.threads.adapters.run(opened, client_of(request).name)
    engine = await engine_for(request, base)
    with _field("lora_path"):
        engine.adapted(file)
    serve = manager.adapters.replace if body.load_inplace else manager.adapters.add
    with _field("lora_name"):
        serve(body.lora_name, base, file, source=body.lora_path)
    text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
    return Response(text, media_type="text/plain")


@router.post("/v1/unload_lora_adapter", response_class=Response, responses=TEXT_RESPONSES)
async def unload_adapter(body: UnloadRequest, request: Request) -> Response:
    """Serve an adapter no more; requests that have it go on.

    Raises:
        Forbidden: the key is not one of an admin, or the operator does not allow it.
        ModelNotFound: there is no such adapter.
    """
    if _allowed(request).manager.adapters.remove(body.lora_name) is None:
        raise ModelNotFound(body.lora_name)
    text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
    return Response(text, media_type="text/plain")


def _allowed(request: Request) -> ServerState:
    check_admin(request)
    state = server_state(request)
    if not state.settings.allow_runtime_adapters:
        setting = f"{env_name('allow_runtime_adapters')}=true"
        raise Forbidden(f"the server's adapters are those of its settings; {setting} allows others")
    return state


def _opened(body: LoadRequest, folders: Sequence[Path]) -> AdapterFile:
    with _field("lora_path"):
        return AdapterFile(resolve_adapter(body.lora_path, folders), body.lora_name)


@contextmanager
def _field(param: str) -> Iterator[None]:
    """Name the field that an adapter's fault is due to."""
    try:
        yield
    except AdapterError as error:
        raise InvalidRequest(param, str(error)) from None
